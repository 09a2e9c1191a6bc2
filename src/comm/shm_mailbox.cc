#include "comm/shm_mailbox.h"

#include <algorithm>
#include <cstring>

#include "unshard/core/error.h"

namespace unshard::comm {

ShmMailbox::ShmMailbox(std::shared_ptr<HostGroupImpl> group) : group_(std::move(group)), rank_(group_->rank()), size_(group_->size()) {
  const std::size_t bytes = sizeof(Ring) * static_cast<std::size_t>(size_) * static_cast<std::size_t>(size_);
  segment_ = group_->create("mailboxes", bytes, bytes, Backing::sparse);
  rings_ = reinterpret_cast<Ring*>(segment_->data());
}

void ShmMailbox::put(const Call& call, Ring& ring, int peer, const std::byte* data, std::size_t bytes) {
  std::uint64_t written = ring.written.load(std::memory_order_relaxed);
  while (bytes > 0) {
    const auto room = [&ring, written] {
      return kRingBytes - static_cast<std::size_t>(written - ring.read.load(std::memory_order_acquire));
    };
    if (room() == 0) group_->wait([&] { return room() > 0; }, {call.op, call.detail}, {[peer](int r) { return r == peer; }, {}});
    const std::size_t at = written % kRingBytes;
    const std::size_t piece = std::min({bytes, room(), kRingBytes - at, kRingBytes / 4});
    std::memcpy(ring.bytes + at, data, piece);
    written += piece;
    ring.written.store(written, std::memory_order_release);
    group_->notify();
    data += piece;
    bytes -= piece;
  }
}

void ShmMailbox::take(const Call& call, Ring& ring, int peer, std::byte* data, std::size_t bytes) {
  std::uint64_t read = ring.read.load(std::memory_order_relaxed);
  while (bytes > 0) {
    const auto held = [&ring, read] { return static_cast<std::size_t>(ring.written.load(std::memory_order_acquire) - read); };
    if (held() == 0) group_->wait([&] { return held() > 0; }, {call.op, call.detail}, {[peer](int r) { return r == peer; }, {}});
    const std::size_t at = read % kRingBytes;
    const std::size_t piece = std::min({bytes, held(), kRingBytes - at, kRingBytes / 4});
    std::memcpy(data, ring.bytes + at, piece);
    read += piece;
    ring.read.store(read, std::memory_order_release);
    group_->notify();
    data += piece;
    bytes -= piece;
  }
}

void ShmMailbox::send(const Call& call, const std::byte* data, std::size_t bytes, int destination, int tag) {
  const Header header{tag, bytes};
  Ring& to = ring(rank_, destination);
  put(call, to, destination, reinterpret_cast<const std::byte*>(&header), sizeof(header));
  put(call, to, destination, data, bytes);
}

void ShmMailbox::recv(const Call& call, std::byte* data, std::size_t bytes, int source, int tag) {
  const auto check_length = [&](std::size_t came) {
    if (came != bytes)
      throw CommError(cat(Place{call.op, call.detail}.text(), " rank ", rank_, " expects ", bytes, " bytes with tag ", tag, " from rank ",
                          source, ", which sent ", came));
  };
  auto& waiting = early_[{source, tag}];
  if (!waiting.empty()) {
    const auto message = std::move(waiting.front());
    waiting.pop_front();
    check_length(message.size());
    if (bytes) std::memcpy(data, message.data(), bytes);
    return;
  }
  Ring& from = ring(source, rank_);
  for (;;) {
    Header header;
    take(call, from, source, reinterpret_cast<std::byte*>(&header), sizeof(header));
    if (header.tag == tag) {
      check_length(header.bytes);
      take(call, from, source, data, bytes);
      return;
    }
    std::vector<std::byte> message(header.bytes);
    take(call, from, source, message.data(), message.size());
    early_[{source, header.tag}].push_back(std::move(message));
  }
}

}  // namespace unshard::comm
