#pragma once
// The shared memory in which ranks of one host post gradient buckets: a board a rank (what it posted, how far it is) and its ring of slots.
//
// [Note: log] A rank appends one entry a post to its log, a ring as long as it has slots. Peers read every log in order. Entry i can be
// overwritten by entry i + slots: at most `slots` posts are unconsumed, so one of the posts i .. i + slots - 1 has been consumed by all,
// and whoever consumed it has read the log up to it.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "bucket_plan.h"

namespace unshard {

class HostGroup;
class SharedSegment;

class GradientBoard {
 public:
  struct Entry {
    std::uint64_t epoch = 0;
    std::uint32_t bucket = 0, round = 0, slot = 0, unused = 0;
  };
  /// Written by its rank only. A zero-filled segment is a valid initial state.
  struct alignas(64) Rank {
    std::atomic<std::uint64_t> posted;       ///< entries in the log
    std::atomic<std::uint64_t> epoch;        ///< this rank is in
    std::atomic<std::uint64_t> declared;     ///< epoch + 1 whose counts are final; nothing more is begun in it
    std::atomic<std::uint64_t> drains;       ///< drain() calls begun
    std::atomic<std::uint64_t> drain_epoch;  ///< epoch the last one is about
    std::atomic<std::uint64_t> contributed;  ///< to that epoch: 0 or 1
  };
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

  /// Collective.
  GradientBoard(HostGroup& host, const BucketPlan& plan, std::int64_t ring_bytes);
  ~GradientBoard();

  /// The last slot is kept for drains, see SharedReducer.
  int slots() const { return slots_; }
  std::int64_t ring_bytes() const { return static_cast<std::int64_t>(slot_bytes_) * slots_; }
  Rank& rank(int r) const { return ranks_[r]; }
  /// Rounds of `bucket` that rank r has in its declared epoch.
  std::atomic<std::uint32_t>& count(int r, int bucket) const { return counts_[static_cast<std::size_t>(r) * buckets_ + bucket]; }
  /// Ranks that have consumed what is in the slot.
  std::atomic<std::uint32_t>& consumed(int r, int slot) const { return consumed_[static_cast<std::size_t>(r) * slots_ + slot]; }
  Entry& entry(int r, std::uint64_t index) const { return entries_[static_cast<std::size_t>(r) * slots_ + index % slots_]; }
  std::byte* slot(int r, int slot) const { return data_ + (static_cast<std::size_t>(r) * slots_ + slot) * slot_bytes_; }

 private:
  std::size_t buckets_ = 0, slot_bytes_ = 0;
  int slots_ = 0;
  std::shared_ptr<SharedSegment> segment_;
  Rank* ranks_ = nullptr;
  std::atomic<std::uint32_t>*counts_ = nullptr, *consumed_ = nullptr;
  Entry* entries_ = nullptr;
  std::byte* data_ = nullptr;
};

}  // namespace unshard
