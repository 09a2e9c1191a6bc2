#include "comm/peer_health.h"

#include <algorithm>

#include "unshard/core/error.h"

namespace unshard::comm {

// A process that died comes before one that failed, which may have failed because of it.
std::string PeerHealth::ended(const std::vector<int>& numbers, bool also_in_order) const {
  const auto place = [&](int number) { return std::find(numbers.begin(), numbers.end(), number) - numbers.begin(); };
  const auto is_member = [&](int number) { return place(number) < static_cast<std::ptrdiff_t>(numbers.size()); };
  for (const int number : local_.dead())
    if (is_member(number)) return cat("rank ", place(number), " is gone (its process on this host ended)");
  if (!remote_) return {};
  const auto ends = remote_->ended();
  for (const auto kind : {RemoteWatch::Kind::died, RemoteWatch::Kind::failed, RemoteWatch::Kind::left})
    for (const auto& end : ends)
      if (end.kind == kind && is_member(end.rank) && (kind != RemoteWatch::Kind::left || also_in_order))
        return cat("rank ", place(end.rank), " ", end.how);
  return {};
}

}  // namespace unshard::comm
