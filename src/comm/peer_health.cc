#include "comm/peer_health.h"

#include <algorithm>

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
      if (end.kind == kind && is_member(end.rank) && (kind != RemoteWatch::Kind::left || also_in_order))
        return cat("rank ", place(end.rank), " ", end.how);
  return {};
}

}  // namespace unshard::comm
