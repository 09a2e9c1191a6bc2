#pragma once
// A span of the timeline about the bytes of several parameters. Names are put together only when somebody records.
#include <optional>
#include <string>
#include <vector>

#include "unshard/core/timeline.h"
#include "zero/entry.h"

namespace unshard::zero {

class GatherSpan {
 public:
  GatherSpan(Timeline& timeline, Lane lane, std::string_view what, const std::vector<Entry*>& entries) {
    if (!timeline.is_on() || entries.empty()) return;
    std::int64_t bytes = 0;
    for (const auto* entry : entries) bytes += static_cast<std::int64_t>(entry->whole_bytes());
    names_ = entries.front()->info.name;
    if (entries.size() > 1) names_ += " and " + std::to_string(entries.size() - 1) + " more";
    span_.emplace(timeline, lane, what, names_, bytes);
  }

 private:
  std::string names_;
  std::optional<TimelineSpan> span_;
};

}  // namespace unshard::zero
