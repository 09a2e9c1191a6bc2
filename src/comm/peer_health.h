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
  /// All number ranks alike; `remote` may be null. `places`: "worker-1, 10.0.0.1", by rank, for messages.
  PeerHealth(PeerWatch local, std::unique_ptr<RemoteWatch> remote, int rank, std::vector<std::string> places)
      : local_(std::move(local)), remote_(std::move(remote)), rank_(rank), places_(std::move(places)) {}

  /// "rank 1 is gone (...)" about the first of `numbers` that ended, called by its place there; empty: nothing is known.
  /// `also_in_order`: a peer that took its leave counts too.
  std::string ended(const std::vector<int>& numbers, bool also_in_order) const;
  /// What is known of a rank of another host that waits for nobody in its group, called `name`; `waits`: whether it says that it waits.
  std::string describe(int number, int name, bool& waits) const;
  /// Tell the ranks of other hosts what this one waits in; empty: nothing any more.
  void say(std::string_view text) const {
    if (remote_) remote_->say(text);
  }
  void set_departure(std::string_view why) const {
    if (remote_) remote_->set_departure(why);
  }
  /// Tell the ranks of other hosts why this one gives up.
  void fail(std::string_view reason) const {
    if (remote_) remote_->fail(reason);
  }

 private:
  const PeerWatch local_;
  const std::unique_ptr<RemoteWatch> remote_;
  const int rank_;
  const std::vector<std::string> places_;
};

}  // namespace unshard::comm
