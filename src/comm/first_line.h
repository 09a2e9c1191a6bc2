#pragma once
// torch's errors carry a backtrace; messages of ours quote their first line.
#include <algorithm>
#include <string>
#include <string_view>

namespace unshard::comm {

inline std::string first_line(std::string_view text, std::size_t limit = 300) {
  return std::string(text.substr(0, std::min(text.find('\n'), limit)));
}

}  // namespace unshard::comm
