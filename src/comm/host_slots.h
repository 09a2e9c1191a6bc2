#pragma once
// Shared memory of a host's ranks that collectives across hosts pass through: a few slots, used in turns.
#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "comm/host_group_internal.h"
#include "comm/shm_lanes.h"
#include "comm/transport.h"

namespace unshard::comm {

/// [Note: turns] A collective takes a slot for each of its pieces, alike on all ranks of the host, and in each turn all of them meet at
/// least once. A rank is through with turn t before it comes to the meeting of turn t + 1, and takes the slot of turn t + 3 only after that
/// one: what it then writes nobody reads any more. Two pieces can thus be under way, the one that arrives and the one that is being sent.
class HostSlots {
 public:
  static constexpr std::uint64_t kSlots = 3;
  static constexpr std::size_t kLaneBytes = 2 << 20;

  /// Collective. A slot has a lane for every rank of the host, and one for what comes out.
  explicit HostSlots(std::shared_ptr<HostGroupImpl> group);

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// The next turn's slot.
  std::byte* take();
  std::byte* lane(std::byte* slot, int rank) const { return slot + static_cast<std::size_t>(rank) * kLaneBytes; }
  std::byte* result(std::byte* slot) const { return lane(slot, size_); }
  /// Wait for all ranks of the host. \throws CommError naming both calls where ranks are in different ones.
  void meet(const Call& call, const Signature& signature);
  /// A tensor of bytes over part of a slot, which keeps the memory mapped.
  at::Tensor over(std::byte* data, std::size_t bytes) const;

 private:
  struct alignas(kCacheLine) Cell {
    std::atomic<std::uint64_t> kind, bytes;
  };
  Cell& cell(int rank, std::uint64_t meeting) const { return cells_[static_cast<std::uint64_t>(rank) * 2 + meeting % 2]; }

  const std::shared_ptr<HostGroupImpl> group_;
  const int rank_, size_;
  const std::size_t slot_bytes_;
  std::shared_ptr<SharedSegment> segment_;
  Cell* cells_ = nullptr;
  std::byte* slots_ = nullptr;
  std::uint64_t turns_ = 0, meetings_ = 0;
};

}  // namespace unshard::comm
