#pragma once
// Point-to-point messages between ranks of a host: one byte ring for every ordered pair.
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "comm/host_group_internal.h"
#include "comm/transport.h"

namespace unshard::comm {

/// Messages of one pair and tag arrive in order. A send returns when its last byte is in the ring, so a message longer than the ring
/// returns only once the receiver takes it. Pages of pairs that never talk are never allocated.
class ShmMailbox {
 public:
  static constexpr std::size_t kRingBytes = 128 << 10;

  /// Collective.
  explicit ShmMailbox(std::shared_ptr<HostGroupImpl> group);
  void send(const Call& call, const std::byte* data, std::size_t bytes, int destination, int tag);
  /// \throws CommError when the message has another length.
  void recv(const Call& call, std::byte* data, std::size_t bytes, int source, int tag);

 private:
  struct alignas(kCacheLine) Ring {
    alignas(kCacheLine) std::atomic<std::uint64_t> written;
    alignas(kCacheLine) std::atomic<std::uint64_t> read;
    alignas(kCacheLine) std::byte bytes[kRingBytes];
  };
  struct Header {
    std::int64_t tag = 0;
    std::uint64_t bytes = 0;
  };
  Ring& ring(int source, int destination) const { return rings_[source * size_ + destination]; }
  void put(const Call& call, Ring& ring, int peer, const std::byte* data, std::size_t bytes);
  void take(const Call& call, Ring& ring, int peer, std::byte* data, std::size_t bytes);

  const std::shared_ptr<HostGroupImpl> group_;
  const int rank_, size_;
  std::shared_ptr<SharedSegment> segment_;
  Ring* rings_ = nullptr;
  /// Messages that came before the one asked for, by (source, tag).
  std::map<std::pair<int, std::int64_t>, std::deque<std::vector<std::byte>>> early_;
};

}  // namespace unshard::comm
