#pragma once
// torch's errors carry a backtrace; messages of ours quote their first line.
#include <algorithm>
#include <string>
#include <string_view>

namespace unshard::comm {

inline std::string first_line(std::string_view text, std::size_t limit = 300) {
  return std::string(text.substr(0, std::min(text.find('\n'), limit)));
}

/// What a rank tells the others of its failure. Where it only hands on what it heard ("... rank 1 failed: ... rank 2 failed: why"), those
/// in between are left out: what is told is cut at some length, and the cause stands at its end.
inline std::string failure_to_tell(std::string_view reason) {
  constexpr std::string_view kFailed = " failed: ";
  const auto rank_before = [&](std::size_t at) { return at == std::string_view::npos ? at : reason.rfind("rank ", at); };
  const auto first = rank_before(reason.find(kFailed)), last = rank_before(reason.rfind(kFailed));
  if (first == std::string_view::npos || last == std::string_view::npos || first == last) return first_line(reason, 500);
  return first_line(std::string(reason.substr(0, first)).append(reason.substr(last)), 500);
}

}  // namespace unshard::comm
