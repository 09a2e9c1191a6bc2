// Turns: a step, or a pass without gradients. Which one a touch belongs to, and which trace and plan are followed in it.
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <utility>

#include "unshard/core/error.h"
#include "unshard/core/log.h"
#include "zero/state.h"

namespace unshard::zero {
namespace {

// One warning a store: what it cost in the step that ends that ranks went different ways. Lock held.
void report_divergence(StoreState& state, bool traces_differ) {
  auto& turn = state.divergence;
  const auto& follower = *state.of(Mode::train).follower;
  const auto cost = cat("In step ", turn.step, " this rank fetched ", state.demanded_bytes.load() - turn.bytes,
                        " bytes at a touch and not ahead of it, and waited ",
                        std::llround(static_cast<double>(state.wait_ns.load() - turn.wait_ns) * 1e-6),
                        " ms for bytes of other hosts. (Said once; stats().outside_plan goes on counting)");
  const bool had_plan = follower.agreed() && !follower.plan().gathers.empty();
  if (!turn.warned && traces_differ && had_plan && turn.touches > 0) {
    turn.warned = true;
    log_warning(state.rank, cat("ranks touched different parameters. Touches of this rank outside the plan that all had agreed on: ",
                                turn.touches, ", the first of '", state.entries[static_cast<std::size_t>(turn.first)]->info.name,
                                "'; they were served one-sided. ", cost));
  } else if (!turn.warned && traces_differ && !had_plan && state.rank == 0) {
    turn.warned = true;
    log_warning(state.rank, cat("ranks touched different parameters, or in a different order, so that no plan is right for all of them; ",
                                "each rank follows its own order. ", cost));
  }
  turn = {0, -1, state.comm->step(), state.demanded_bytes.load(), state.wait_ns.load(), turn.warned};
}

// The plan is made when the trace is another one than before. Lock held.
void renew_plan(StoreState& state, ModeState& mode) {
  if (!std::exchange(mode.plan_is_old, false)) return;
  std::vector<PlanParameter> parameters;
  for (const auto& entry : state.entries)
    parameters.push_back({entry->info.layout.numel, entry->elsewhere_numel, entry->elsewhere_bytes()});
  const auto& options = state.options;
  mode.follower->set_plan(
      make_plan(mode.trace.followed(), parameters, {options.max_live_numel, options.prefetch_numel, options.max_reuse_distance}));
}

// A pass of the current mode begins. Lock held.
void open_pass(StoreState& state) {
  auto& mode = state.now();
  state.close_pass();
  state.last_touched = -1;
  if (!state.host_copy) return;
  renew_plan(state, mode);
  mode.follower->begin_pass();
  state.wake_fetch_ahead();
}

void leave_mode(StoreState& state) {
  state.close_pass();
  if (state.host_copy && state.mode != Mode::train) state.follower().leave();
  state.last_touched = -1;
}

void switch_to(StoreState& state, Mode next) {
  if (state.mode == next) return;
  leave_mode(state);
  state.mode = next;
  state.last_touched = state.trace().last();
  if (!state.host_copy || next != Mode::train) return;
  state.follower().resume();
  state.wake_fetch_ahead();
}

}  // namespace

void StoreState::close_pass() {
  if (mode == Mode::train || !now().trace.end_pass()) return;
  now().plan_is_old = true;
  if (host_copy) follower().set_agreed(false);
}

void StoreState::note_mode(int id) {
  switch_to(*this, mode_of_touch(forward, !of(Mode::train).trace.recorded().empty()));
  if (mode != Mode::generate || id == last_touched) return;
  const auto& recorded = trace().recorded();
  if (recorded.empty() || recorded.front() == id) open_pass(*this);
}

void StoreState::begin_forward() {
  const std::lock_guard lock(mutex);
  forward = at::GradMode::is_enabled() ? Forward::with_gradients : Forward::without_gradients;
  if (forward == Forward::with_gradients || !service || inference || released) return;
  switch_to(*this, Mode::eval);
  open_pass(*this);
}

void StoreState::end_forward() {
  const std::lock_guard lock(mutex);
  forward = Forward::none;
}

// Where all ranks' traces of a mode are equal they follow its plan together; that changes here only, where all ranks are.
void StoreState::begin_step() {
  const std::lock_guard lock(mutex);
  leave_mode(*this);
  mode = Mode::train;
  auto& train = now();
  const auto& settled = train.settled;
  const bool recorded = !train.trace.recorded().empty();
  const bool known = settled.hash == train.trace.recorded_hash() && settled.touches == train.trace.recorded().size();
  if (train.trace.begin_step()) train.plan_is_old = true;
  if (!host_copy || released) return;
  report_divergence(*this, recorded && known && !settled.equal);
  if (recorded) train.follower->set_agreed(known && settled.equal);
  longest_pause = std::exchange(longest_now, std::chrono::nanoseconds(0));
  for (auto& each : modes) {
    if (&each != &train && !each.trace.followed().empty())
      each.follower->set_agreed(each.settled.equal && each.settled.hash == each.trace.followed_hash() &&
                                each.settled.touches == each.trace.followed().size());
    renew_plan(*this, each);
    each.follower->begin_step();
  }
  wake_fetch_ahead();
}

}  // namespace unshard::zero
