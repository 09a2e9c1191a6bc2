#pragma once
// The serving side of one-sided reads: one thread that answers any number of connections by poll, straight from where the pieces rest.
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "zero/shard_service.h"
#include "zero/shard_wire.h"
#include "zero/socket.h"

namespace unshard {

class ShardServer {
 public:
  /// \param patience  how long a request may wait for a parameter that isn't added yet, before it is refused.
  ShardServer(int rank, net::Listener listener, wire::Secret secret, ShardService::Lookup lookup, std::chrono::duration<double> patience);
  ~ShardServer();  ///< closes every connection: readers that wait see at once that this rank is gone
  std::int64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }  ///< of pieces, once their answer begins
  ShardServer(const ShardServer&) = delete;
  ShardServer& operator=(const ShardServer&) = delete;

 private:
  struct Connection;
  void run();
  void accept_waiting();

  const int rank_, process_;
  const wire::Secret secret_;
  const ShardService::Lookup lookup_;
  const std::chrono::duration<double> patience_;
  net::Listener listener_;
  net::Descriptor stop_;                                  // an eventfd: readable when the thread has to end
  std::vector<std::unique_ptr<Connection>> connections_;  // the thread's own
  std::atomic<std::int64_t> bytes_sent_{0};
  std::thread thread_;
};

}  // namespace unshard
