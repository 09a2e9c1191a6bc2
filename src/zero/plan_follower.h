#pragma once
// Where a host's ranks are in a plan, and which gather is next. Local ranks that follow the agreed plan share one cursor, so that they
// share its work; a rank on its own follows its own. Nothing here is needed for right values: gathers that come late are made by a touch.
#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "zero/host_copy.h"
#include "zero/plan.h"

namespace unshard::zero {

class PlanFollower {
 public:
  explicit PlanFollower(HostCopy& host_copy);

  /// A new turn, at the plan's head. \param agreed  all ranks follow this plan. Every rank begins as many turns.
  void begin(bool agreed);
  void set_plan(Plan plan) { plan_ = std::move(plan); }
  const Plan& plan() const { return plan_; }
  bool agreed() const { return agreed_; }

  /// This rank's next touch is expected at `position`.
  void moved(std::size_t position);
  /// Some gather may start now.
  bool has_work();
  /// The next gather that may start, taken; nothing: none may. \return its index.
  std::optional<std::size_t> take();
  /// It could not be made now (no room): it is the next one again.
  void put_back(std::size_t index);

  using Positions = c10::SmallVector<std::size_t, 8>;
  /// Positions of the host's ranks that follow the same plan (own one included); of a rank that has yet to begin the turn: 0.
  Positions positions();
  /// A number that changes when another rank of the host moves.
  std::uint64_t others_progress();

 private:
  std::atomic<std::uint64_t>& cursor() { return agreed_ ? host_copy_.cursor() : own_cursor_; }
  std::size_t index_of(std::uint64_t cursor_word) const;

  HostCopy& host_copy_;
  Plan plan_;
  bool agreed_ = false;
  std::uint32_t turn_ = 0;
  std::size_t position_ = 0;
  std::atomic<std::uint64_t> own_cursor_{0};
};

}  // namespace unshard::zero
