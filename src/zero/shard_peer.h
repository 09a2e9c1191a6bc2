#pragma once
// How to reach another rank's shard server, and whether it is still there.
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "zero/shard_wire.h"
#include "zero/socket.h"

namespace unshard {

/// Waits of the reading side: how long without progress, and what to call meanwhile (it throws to leave).
struct ShardWait {
  std::chrono::duration<double> timeout{1800};
  std::function<void()> interrupt_check = {};
};
/// poll's time slice in such waits, ms.
inline constexpr int kWaitSliceMs = 50;

/// What a rank tells the others at the start, and what they make of it.
class ShardPeer {
 public:
  /// This rank's card for an all-gather of strings.
  static std::string card(int port, const std::vector<std::string>& addresses);
  /// Read a card. \throws CommError it isn't one.
  ShardPeer(int own_rank, int rank, const std::string& card);

  int rank() const { return rank_; }
  /// A new connection that has proved to reach this peer. Tries its addresses in turn; \p used becomes the index of the one that worked.
  /// \throws CommError naming the rank and every address with its error.
  net::Descriptor connect(const wire::Secret& secret, const ShardWait& wait, std::size_t* used = nullptr) const;
  /// Try this address first from now on. Not while another thread connects.
  void prefer(std::size_t address) { std::swap(addresses_.at(0), addresses_.at(address)); }
  /// On this host: readable once the process has ended; -1 where that can't be watched.
  int process_descriptor() const { return process_.get(); }
  /// "rank 2 is gone: its process (pid 123) has ended"
  std::string obituary() const;

 private:
  net::Descriptor try_address(const std::string& address, const wire::Secret& secret, const ShardWait& wait, std::string* error) const;

  int own_rank_, rank_, port_ = 0, pid_ = 0;
  std::vector<std::string> addresses_;
  net::Descriptor process_;
};

}  // namespace unshard
