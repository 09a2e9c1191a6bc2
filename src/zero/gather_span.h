#pragma once
// A span of the timeline about the bytes of several parameters. Names are put together only when somebody records.
#include <optional>
#include <string>
#include <vector>

#include "unshard/core/timeline.h"
#include "zero/entry.h"

namespace unshard::zero {

/// "a.weight and 2 more".
inline std::string names_of(const std::vector<Entry*>& entries) {
  if (entries.empty()) return {};
  const std::string& first = entries.front()->info.name;
  return entries.size() > 1 ? first + " and " + std::to_string(entries.size() - 1) + " more" : first;
}

class GatherSpan {
 public:
  GatherSpan(Timeline& timeline, Lane lane, std::string_view what, const std::vector<Entry*>& entries) {
    if (!timeline.is_on() || entries.empty()) return;
    std::int64_t bytes = 0;
    for (const auto* entry : entries) bytes += static_cast<std::int64_t>(entry->whole_bytes());
    names_ = names_of(entries);
    span_.emplace(timeline, lane, what, names_, bytes);
  }

 private:
  std::string names_;
  std::optional<TimelineSpan> span_;
};

}  // namespace unshard::zero
