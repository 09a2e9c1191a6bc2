#include "comm/failure_text.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>

#include "comm/first_line.h"
#include "unshard/core/error.h"

namespace unshard::comm {

namespace {

constexpr std::string_view kRank = "rank ";
constexpr std::array<std::string_view, 3> kEnds{" failed: ", " is gone", " left the group"};
constexpr std::size_t kLongest = 500;

std::string_view without(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix ? text.substr(prefix.size()) : std::string_view();
}

/// After "rank 2": what follows its process id, if that is there.
std::string_view after_pid(std::string_view rest) {
  const auto pid = without(rest, " (pid ");
  const auto end = pid.find(')');
  return end == std::string_view::npos ? rest : pid.substr(end + 1);
}

}  // namespace

Origin origin_of(std::string_view told) {
  const auto number = without(told, kRank);
  Origin origin;
  const auto parsed = std::from_chars(number.data(), number.data() + number.size(), origin.rank);
  if (parsed.ec != std::errc{}) return {};
  origin.rest = number.substr(static_cast<std::size_t>(parsed.ptr - number.data()));
  const auto verb = after_pid(origin.rest);
  if (std::none_of(kEnds.begin(), kEnds.end(), [&](std::string_view end) { return !without(verb, end).empty() || verb == end; })) return {};
  return origin;
}

// The last one is where it began, if texts came in each other.
std::string failure_to_tell(std::string_view reason) {
  reason = reason.substr(0, reason.find('\n'));
  for (auto at = reason.rfind(kRank); at != std::string_view::npos; at = at == 0 ? std::string_view::npos : reason.rfind(kRank, at - 1)) {
    if (origin_of(reason.substr(at)).rank < 0 || (at > 0 && std::isalnum(static_cast<unsigned char>(reason[at - 1])))) continue;
    reason = reason.substr(at);
    break;
  }
  return first_line(reason.substr(0, reason.find("; this is rank ")), kLongest);
}

bool is_handed_on(std::string_view told) { return origin_of(told).rank >= 0; }

std::string failure_told_by(int rank, std::string_view told, int self) {
  const int origin = origin_of(told).rank;
  return origin >= 0 && origin != self ? std::string(told) : cat("rank ", rank, " failed: ", told);
}

std::string departure(std::string_view reason) {
  return reason.empty() ? "left the group (it told no error: had it fewer batches, or left its loop early?)"
                        : cat("left the group after ", reason);
}

}  // namespace unshard::comm
