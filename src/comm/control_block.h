#pragma once
// What ranks of one host write for each other in shared memory. Zero-filled memory is its valid initial state.
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "comm/shared_text.h"
#include "unshard/comm/host_group.h"

namespace unshard::comm {

inline constexpr std::size_t kCacheLine = 64;
inline constexpr std::size_t kMaxAnnounceBytes = 256;

/// One rank's small all_gather contribution. Two a rank: a rank can write number k + 2 only after number k + 1 ended, by when all read k.
struct alignas(kCacheLine) SmallSlot {
  std::atomic<std::uint64_t> sequence;
  std::atomic<std::uint32_t> bytes;
  alignas(kCacheLine) std::byte data[HostGroup::kSmallBytes];
};

struct alignas(kCacheLine) Announcement {
  std::atomic<std::uint64_t> sequence;
  SharedText<kMaxAnnounceBytes> call;
};

struct alignas(kCacheLine) RankBlock {
  alignas(kCacheLine) std::atomic<std::uint64_t> barriers;  ///< barriers this rank has entered
  alignas(kCacheLine) std::atomic<std::int32_t> phase;
  std::atomic<std::int32_t> pid;
  std::atomic<std::int64_t> step;
  std::atomic<std::int64_t> since_ns;  ///< monotonic, of the last phase change
  SharedText<104> detail;
  std::atomic<std::int32_t> left_from;  ///< the phase before failed or gone
  std::atomic<std::int32_t> waits;      ///< > 0: sleeps in a wait, described by `waiting`
  SharedText<160> waiting;
  std::atomic<std::int64_t> waiting_since_ns;  ///< monotonic
  SharedText<504> failure;                     ///< reason, set before phase = failed, or gone
  SharedText<256> elsewhere;                   ///< a wait of this rank that isn't in this group's memory; empty: none
  Announcement announced[2];
  SmallSlot small[2];
};

struct ControlBlock {
  alignas(kCacheLine) std::atomic<std::uint32_t> wake;  ///< futex word; moved by notify()
  alignas(kCacheLine) std::atomic<std::uint32_t> sleepers;
  alignas(kCacheLine) std::atomic<std::uint32_t> departures;  ///< ranks that failed or left: nonzero makes waits look closer
  alignas(kCacheLine) RankBlock ranks[1];                     ///< in truth as many as there are ranks

  static std::size_t bytes(int ranks) { return sizeof(ControlBlock) + (static_cast<std::size_t>(ranks) - 1) * sizeof(RankBlock); }
};

}  // namespace unshard::comm
