#pragma once
// The staging memory of shared-memory collectives: one lane a rank, a few slots a lane, counters instead of barriers.
#include <cstddef>
#include <cstdint>
#include <memory>

#include "comm/host_group_internal.h"
#include "comm/transport.h"

namespace unshard::comm {

/// Compared between ranks at the first step of every collective: ranks in different calls get an error, not mixed-up bytes.
struct Signature {
  std::uint64_t kind = 0;  ///< operation, reduction, dtype, root
  std::uint64_t bytes = 0;
  bool operator==(const Signature&) const = default;
};

/// [Note: lane protocol] Steps are numbered from 1 without end, alike on all ranks. In step s a rank writes slot s % kSlots of its lane and
/// moves `posted` to s; having read what it needs of all peers' step s it moves `done` to s. A slot is written again kSlots steps later, so
/// before writing step s a rank waits until all peers are done with step s - kSlots. Ranks thus run at most kSlots steps apart, and copying
/// into step s + 1 overlaps the peers' reading of step s.
class ShmLanes {
 public:
  static constexpr std::size_t kSlots = 4;
  static constexpr std::size_t kSlotBytes = 128 << 10;  // both ranks' slots stay in the L2/L3 cache

  /// Collective.
  explicit ShmLanes(std::shared_ptr<HostGroupImpl> group);

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Number of the first step of a collective that takes `steps` of them.
  std::uint64_t begin(const Signature& signature, std::uint64_t steps);

  /// Memory to fill for `step`, once no peer reads its former content. Then post().
  std::byte* acquire(const Call& call, std::uint64_t step);
  void post(std::uint64_t step);
  /// What `peer` posted for `step`; waits for it.
  const std::byte* read(const Call& call, int peer, std::uint64_t step);
  void done(std::uint64_t step);
  /// Wait for every rank's first step and compare signatures. \throws CommError naming both calls.
  void compare_signatures(const Call& call, std::uint64_t first_step);

 private:
  struct alignas(kCacheLine) Counters {
    alignas(kCacheLine) std::atomic<std::uint64_t> posted;
    alignas(kCacheLine) std::atomic<std::uint64_t> done;
    /// Of the collective before last, and so on in turns: all ranks have compared a collective's before anyone starts the second next.
    alignas(kCacheLine) std::atomic<std::uint64_t> kind[2];
    std::atomic<std::uint64_t> bytes[2];
  };
  Counters& counters(int rank) const { return counters_[rank]; }
  std::byte* slot(int rank, std::uint64_t step) const {
    return lanes_ + (static_cast<std::size_t>(rank) * kSlots + step % kSlots) * kSlotBytes;
  }
  void wait_posted(const Call& call, int peer, std::uint64_t step);

  const std::shared_ptr<HostGroupImpl> group_;
  const int rank_, size_;
  std::shared_ptr<SharedSegment> segment_;
  Counters* counters_ = nullptr;
  std::byte* lanes_ = nullptr;
  std::uint64_t step_ = 0, collectives_ = 0;
  Signature signature_;
};

std::string describe_signature(const Signature& signature);
/// `dtype` as its number.
Signature make_signature(const Call& call, std::uint64_t bytes, int dtype, ReduceOp op, int root);

}  // namespace unshard::comm
