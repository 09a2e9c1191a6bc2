#pragma once
// Errors. A caller's mistake is std::invalid_argument (Python ValueError), found before the first collective; the outside world fails
// as one of the runtime errors below; a bug of ours trips UNSHARD_DCHECK. Messages say: [area.function] what came, what was wanted, the way
// out.
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace unshard {

/// The configuration can't be used: wrong key, type, value or combination. Names key, value, origin and what is accepted.
struct ConfigError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A peer failed, stalled or disagreed. Names rank, collective, parameter and step; the group must not be used again.
struct CommError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A state file is damaged, foreign or missing. Names file and reason; nothing was half loaded.
struct CheckpointError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Concatenate anything streamable.
template <class... Parts>
std::string cat(Parts&&... parts) {
  std::ostringstream out;
  (out << ... << std::forward<Parts>(parts));
  return out.str();
}

/// throw std::invalid_argument(parts...) unless `ok`.
template <class... Parts>
void require(bool ok, Parts&&... parts) {
  if (!ok) [[unlikely]]
    throw std::invalid_argument(cat(std::forward<Parts>(parts)...));
}

}  // namespace unshard

#define UNSHARD_DCHECK(cond, ...)                                                                                      \
  do {                                                                                                                 \
    if (!(cond)) [[unlikely]]                                                                                          \
      throw std::logic_error(::unshard::cat("[unshard bug] ", __FILE__, ":", __LINE__, " " #cond " ", ##__VA_ARGS__)); \
  } while (false)
