#pragma once
// What is known of ranks that ended or failed: by pidfd on this host, by connection on others. One for a communicator and its sub-groups.
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/peer_watch.h"
#include "comm/remote_watch.h"

namespace unshard::comm {

class PeerHealth {
 public:
  /// Both number ranks alike; `remote` may be null.
  PeerHealth(PeerWatch local, std::unique_ptr<RemoteWatch> remote) : local_(std::move(local)), remote_(std::move(remote)) {}

  /// "rank 1 is gone (...)" about the first of `numbers` that ended, called by its place there; empty: nothing is known.
  /// `also_in_order`: a peer that took its leave counts too.
  std::string ended(const std::vector<int>& numbers, bool also_in_order) const;
  /// Tell the ranks of other hosts why this one gives up.
  void fail(std::string_view reason) const {
    if (remote_) remote_->fail(reason);
  }

 private:
  const PeerWatch local_;
  const std::unique_ptr<RemoteWatch> remote_;
};

}  // namespace unshard::comm
