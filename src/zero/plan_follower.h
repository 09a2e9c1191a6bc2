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

// [Note: turns] A turn is a step, or a pass of one (evaluation). Its number holds the step, of which every rank begins as many, and the
// pass since then, of which ranks may begin unequally many: they are together again at the next step. A word of shared memory holds a turn
// and a place in it; comparing turns goes round.
class PlanFollower {
 public:
  /// \param plan  which of the host's plans this is.
  PlanFollower(HostCopy& host_copy, std::size_t plan);

  void begin_step();  ///< a new turn, at the plan's head
  void begin_pass();  ///< likewise, inside a step
  /// No turn of this rank's is under way until the next one begins: others don't take it for a slow one.
  void leave();
  /// Work goes on where it was. What was brought in ahead of it may have gone.
  void resume();
  /// All ranks follow this plan.
  void set_agreed(bool agreed) { agreed_ = agreed; }
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

 private:
  std::atomic<std::uint64_t>& cursor() { return agreed_ ? host_copy_.cursor(plan_index_) : own_cursor_; }
  std::atomic<std::uint64_t>& own_progress();
  void begin(std::uint64_t turn);
  std::size_t index_of(std::uint64_t cursor_word) const;
  void start_over_from(std::size_t index);

  HostCopy& host_copy_;
  const std::size_t plan_index_;
  Plan plan_;
  bool agreed_ = false;
  std::uint64_t turn_ = 0;
  std::size_t position_ = 0;
  std::atomic<std::uint64_t> own_cursor_{0};
};

}  // namespace unshard::zero
