#pragma once
// Notices that processes of this host ended, by pidfd.
#include <string>
#include <vector>

#include "comm/unique_fd.h"

namespace unshard::comm {

class PeerWatch {
 public:
  PeerWatch() = default;
  /// Watch `pids[r]` for every rank r; 0 and this process's own id are left out. \throws CommError naming a rank that is gone already.
  /// \param names  what rank r is called in messages; empty: r.
  explicit PeerWatch(const std::vector<int>& pids, const std::vector<int>& names = {});

  /// Ranks whose process has ended. One system call.
  std::vector<int> dead() const;
  bool watches_any() const { return !ranks_.empty(); }

 private:
  std::vector<int> ranks_;
  std::vector<UniqueFd> pidfds_;
};

}  // namespace unshard::comm
