#pragma once
// One line on stderr, `[unshard] text`; a warning carries the rank. Nothing is printed at import or by hot paths.
#include <string_view>

namespace unshard {
/// A line for people. By habit only rank 0 calls it. Silenced by UNSHARD_QUIET=1 (read once).
void log_info(std::string_view text);
/// A line that must be seen on any rank.
void log_warning(int rank, std::string_view text);
}  // namespace unshard
