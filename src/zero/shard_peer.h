#pragma once
// How to reach another rank's shard server, and whether it is still there.
#include <atomic>
#include <chrono>
#include <cstdint>
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
  /// "rank 2 is gone (...)" where that is known of a rank of the group, or that it failed; else empty.
  std::function<std::string()> ended = {};
  /// How a rank stands, as far as that is known ("no word from rank 1 (host b, ...) for 4.2 s: ..."); else empty.
  std::function<std::string(int rank)> describe = {};
  std::atomic<std::uint64_t>* moved = nullptr;  ///< counted up whenever bytes come

  /// ended(), asked for a moment: a connection closes before the process can be seen to have ended.
  std::string who_ended() const;
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
  void prefer(std::size_t address) {
    std::swap(addresses_.at(0), addresses_.at(address));
    reached_ = true;
  }
  /// On this host: readable once the process has ended; -1 where that can't be watched.
  int process_descriptor() const { return process_.get(); }
  /// "rank 2 is gone: its process (pid 123) has ended"
  std::string obituary() const;

 private:
  net::Descriptor try_address(const std::string& address, const wire::Secret& secret, const ShardWait& wait, std::string* error) const;

  std::string unreachable(const std::string& errors, const ShardWait& wait) const;

  int own_rank_, rank_, port_ = 0, pid_ = 0;
  bool reached_ = false;  ///< once: ports are open
  bool gone_ = false;     ///< it had ended when this rank heard of it
  std::vector<std::string> addresses_;
  net::Descriptor process_;
};

}  // namespace unshard
