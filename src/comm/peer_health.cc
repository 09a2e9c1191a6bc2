#include "comm/peer_health.h"

#include <algorithm>
#include <iomanip>

#include "comm/failure_text.h"
#include "unshard/core/error.h"

namespace unshard::comm {

// A process that died comes before one that failed, which may have failed because of it.
std::string PeerHealth::ended(const std::vector<int>& numbers, bool also_in_order) const {
  const auto place = [&](int number) { return std::find(numbers.begin(), numbers.end(), number) - numbers.begin(); };
  const auto is_member = [&](int number) { return place(number) < static_cast<std::ptrdiff_t>(numbers.size()); };
  const auto dead = local_.dead();  // before what they said is read: then all they said is there
  const auto ends = remote_ ? remote_->ended() : std::vector<RemoteWatch::End>();
  const auto said_why = [&](int number) {
    return std::any_of(ends.begin(), ends.end(),
                       [&](const RemoteWatch::End& end) { return end.rank == number && end.kind == RemoteWatch::Kind::failed; });
  };
  for (const int number : dead)
    if (is_member(number) && !said_why(number)) return cat("rank ", place(number), " is gone (its process on this host ended)");
  for (const auto kind : {RemoteWatch::Kind::died, RemoteWatch::Kind::failed, RemoteWatch::Kind::left})
    for (const auto& end : ends)
      if (end.kind == kind && is_member(end.rank) && (kind != RemoteWatch::Kind::left || also_in_order)) {
        const auto name = static_cast<int>(place(end.rank));
        if (kind != RemoteWatch::Kind::failed) return cat("rank ", name, " ", end.how);
        const int self = static_cast<int>(place(rank_)), origin = origin_of(end.how).rank;
        if (origin >= 0 && !is_member(origin)) return cat("rank ", name, " failed: ", end.how, " (as the whole run counts)");
        return failure_told_by(name, with_origin_called(end.how, place), self);
      }
  return {};
}

std::string PeerHealth::describe(int number, int name, bool& waits) const {
  waits = false;
  const auto word = remote_ ? remote_->word_of(number) : RemoteWatch::Word{};
  const std::string& where = places_[static_cast<std::size_t>(number)];
  if (!word.connected) return cat("rank ", name, " (host ", where, ") hasn't been heard of: it computes, is stopped, or can't be reached");
  if (word.silent_s > 0)
    return cat("no word from rank ", name, " (host ", where, ") for ", std::fixed, std::setprecision(1), word.silent_s,
               " s: is the network down between it and this rank's host (", places_[static_cast<std::size_t>(rank_)],
               "), or is its host off, or stopped?", word.says.empty() ? "" : cat(" It was last heard ", word.says));
  waits = !word.says.empty();
  if (waits) return cat("rank ", name, ": ", word.says);
  return cat("rank ", name, " waits for nobody that is known: its host (", where,
             ") answers; it computes, fetches parameters, or is stopped");
}

}  // namespace unshard::comm
