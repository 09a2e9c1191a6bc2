#pragma once
// Weights that don't fit in memory: some units stay, the others are read from disk again in every step, ahead of their use.
// Source: ZeRO-Inference (arXiv 2207.00032).
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "inference/stream/units.h"
#include "unshard/offload/async_file.h"

namespace unshard::inference {

/// Where a unit lies in the file.
struct StoredUnit {
  std::int64_t offset = 0;
  std::uint64_t checksum = 0;
};

/// One thread. A pass is begin(), use() of units in ascending order, end().
class WeightStream {
 public:
  /// Cost: the plan's memory. Reads nothing; check() comes first. `queue`: null: one of its own.
  WeightStream(std::vector<Unit> units, const ResidencyPlan& plan, offload::AsyncFile file, std::vector<StoredUnit> stored,
               std::unique_ptr<offload::AsyncQueue> queue = nullptr);
  ~WeightStream();

  /// Brings what stays into memory, and reads all of it once. \return the units whose checksums are wrong \throws ModelError
  std::vector<std::int64_t> check();
  /// This pass uses units [0, units) only.
  void begin(std::int64_t units) { end_ = units; }
  /// The unit's matrices are in memory until the next call of use() or end(). \throws ModelError  it can't be read
  void use(std::int64_t unit);
  /// The next pass's first units are read meanwhile.
  void end();

  std::int64_t units() const { return static_cast<std::int64_t>(units_.size()); }
  std::int64_t bytes_read() const { return bytes_read_; }  ///< so far
  double wait_s() const { return wait_s_; }                ///< in use(), for the disk
  /// What stays, what is read and how.
  std::string describe() const;

 private:
  struct Slot {
    offload::AlignedBuffer memory;
    std::int64_t unit = -1;  ///< that is in it, or on its way into it; -1: none
    std::optional<offload::AsyncQueue::Ticket> ticket;
  };
  void aim(std::int64_t unit);
  void read_into(Slot& slot, std::int64_t unit);
  void arrive(Slot& slot);
  Slot* slot_of(std::int64_t unit);
  std::uint8_t* memory_of(std::int64_t unit);

  std::vector<Unit> units_;
  std::vector<StoredUnit> stored_;
  offload::AsyncFile file_;
  std::vector<offload::AlignedBuffer> kept_;  ///< a unit; empty: streamed
  std::vector<Slot> slots_;
  std::vector<std::int64_t> wanted_;
  std::int64_t end_ = 0, bytes_read_ = 0;
  double wait_s_ = 0;
  std::unique_ptr<offload::AsyncQueue> queue_;  ///< last: it lets go of the memory before that is freed
};

}  // namespace unshard::inference
