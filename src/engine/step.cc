// The agreed update at a gradient accumulation boundary, in this order: all gradients are in; one small message brings norm, overflow and
// presence; update of what this rank owns; new values are published; schedule, scale and counters move.
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <limits>
#include <utility>

#include "engine_state.h"
#include "flat.h"
#include "unshard/core/error.h"
#include "unshard/core/log.h"

namespace unshard {
namespace {

class Timer {
 public:
  double lap() {
    const auto now = std::chrono::steady_clock::now();
    return std::chrono::duration<double, std::milli>(now - std::exchange(last_, now)).count();
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

/// torch's rule with DeepSpeed's epsilon: never enlarge.
double clip_factor(double norm, double max_norm) { return max_norm > 0 ? 1 / std::max(1.0, (norm + 1e-6) / max_norm) : 1; }

}  // namespace

void Engine::State::step() {
  require_alive("step");
  require(!half_loaded, "[engine.step] the last load() failed while values were being replaced; load a checkpoint first");
  require(!no_sync, "[engine.step] called inside no_sync(); leave it before the update (gradients have added up)");
  const bool boundary = is_boundary();
  step_applied = false;
  if (boundary) {
    overflowed = false;
    require(optimizer != nullptr, "[engine.step] there is no optimizer: neither the config nor the options name one");
    update();
  }
  ++counters.micro_steps;
  micro_steps_since_boundary = boundary ? 0 : micro_steps_since_boundary + 1;
}

void Engine::State::update() {
  Timer whole, timer;
  const at::NoGradGuard no_grad;
  times = {};
  auto& timeline = comm->timeline();
  comm->set_step(counters.global_steps);
  backward->forget_running();
  reload();  // states that were offloaded between phases
  {
    const TimelineSpan span(timeline, Lane::reduce, "meet the other ranks");
    check_source();
  }
  hooks.refresh(backward);
  hooks.collect(*backward);
  set_phase(Phase::reducing, "step");
  const auto facts = drain_and_agree();  // first: while a rank waits here, it reduces
  {
    const TimelineSpan span(timeline, Lane::update, "settle values written");
    refresh_masters(store->settle());
  }
  times.reduce_wait_ms = timer.lap();

  set_phase(Phase::updating, "step");
  const double scale = gradient_scale();
  const bool finite = std::isfinite(facts.squares);
  grad_norm = finite ? std::sqrt(facts.squares) * scale : std::numeric_limits<double>::infinity();
  overflowed = !finite && checks_overflow();
  if (overflowed) {
    warn_overflow(facts);
    ++counters.skipped_steps;
  } else {
    const auto items = update_items(facts.present);
    {
      const TimelineSpan span(timeline, Lane::update, "optimizer");
      UpdateScale how{scale * clip_factor(*grad_norm, config.gradient_clipping), {}};
      if (!keeps_whole())
        how.sum_over_ranks = [this](std::vector<double>& values) { sum_over_ranks(*comm, values, "step: norms of parameters"); };
      optimizer->step(items, groups, how);
    }
    times.update_ms = timer.lap();
    set_phase(Phase::publishing, "step");
    {
      const TimelineSpan span(timeline, Lane::update, "publish");
      publish(facts.present);
    }
    times.publish_ms = timer.lap();
    ++counters.applied_updates;
    step_applied = true;
    apply_schedule();
  }
  pipeline->clear();
  loss_was_bad = false;
  if (scaler) scaler->update(overflowed);
  refresh_factor();
  ++counters.global_steps;
  // Where the program itself says when to update, what it brought counts.
  const int passes = backward->take_passes();
  counters.global_samples +=
      config.managed_gradient_accumulation ? config.batch.train_batch_size : passes * config.batch.micro_batch_size * comm->world_size();
  comm->set_step(counters.global_steps);
  store->begin_step(counters.global_steps);
  times.forward_ms = std::exchange(forward_ms, 0.0);
  times.backward_ms = backward->take_ms();
  times.step_ms = whole.lap();
  end_timeline_step(counters.global_steps - 1);
  set_phase(Phase::idle, "after step");
}

double Engine::State::gradient_scale() const {
  const double mean = config.allreduce_mean ? 1.0 / comm->world_size() : 1.0;
  return mean / (scaler ? scaler->scale() : 1.0);
}

// fp32 skips a non-finite update too, as fp16 does; bf16 when asked to (by default).
bool Engine::State::checks_overflow() const { return !config.bf16.enabled || config.bf16.check_grad_overflow; }

GradientFacts Engine::State::own_facts() {
  GradientFacts facts;
  facts.bad_loss = loss_was_bad;
  for (int id = 0; id < static_cast<int>(plan.places.size()); ++id) {
    if (!gradients->has(id)) continue;
    const auto squares = flat::sum_of_squares(gradients->piece(id));
    facts.squares += squares.sum;
    if (squares.finite || facts.bad_parameter >= 0) continue;
    facts.bad_parameter = id;
    for (const auto& place : plan.places[id]) {
      const auto& member = plan.buckets[place.bucket].members[place.member];
      const auto real = std::clamp<std::int64_t>(plan.layouts[id].size(comm->rank()) - member.piece_begin, 0, member.count);
      if (facts.bad_rank < 0) facts.bad_rank = pipeline->reducer().find_nonfinite(place.bucket, member.offset, real);
    }
  }
  return facts;
}

AgreedFacts Engine::State::drain_and_agree() {
  {
    const TimelineSpan span(comm->timeline(), Lane::reduce, "drain");
    pipeline->drain(*comm);
  }
  const TimelineSpan span(comm->timeline(), Lane::reduce, "agree on the norm");
  return agree_on_gradients(*comm, own_facts(), pipeline->present());
}

void Engine::State::warn_overflow(const AgreedFacts& facts) {
  if (comm->rank() != 0) return;
  const auto* parameter = model.find(facts.bad_parameter);
  const std::string from = facts.bad_rank >= 0 ? cat(" of rank ", facts.bad_rank) : "";
  const std::string scale = scaler ? cat(" (loss scale ", scaler->scale(), ")") : "";
  log_warning(comm->rank(), cat("step ", counters.global_steps, " skipped on all ranks: the gradient", from,
                                " is not finite, first in parameter '", parameter ? parameter->name : "?", "'", scale));
}

std::vector<UpdateItem> Engine::State::update_items(const std::vector<std::uint8_t>& present) {
  std::vector<UpdateItem> items;
  for (int id = 0; id < static_cast<int>(present.size()); ++id) {
    const auto* parameter = present[id] ? model.find(id) : nullptr;
    if (!parameter || !parameter->is_trained()) continue;
    if (parameter->dtype != c10::kFloat && !masters->has(id)) {  // unfrozen after the start
      masters->reserve({{id, parameter->layout}});
      flat::copy(masters->domain(id), domain(id));
    }
    items.push_back({id, parameter->group, domain(id), masters->domain(id), gradients->domain(id)});
  }
  return items;
}

void Engine::State::publish(const std::vector<std::uint8_t>& updated) {
  if (!keeps_whole()) {
    store->publish(updated);
    return;
  }
  // Stage 0: every rank has made the same update of the whole; only the version counters must tell.
  for (int id = 0; id < static_cast<int>(updated.size()); ++id) {
    const auto* parameter = updated[id] ? model.find(id) : nullptr;
    if (!parameter) continue;
    parameter->tensor.unsafeGetTensorImpl()->bump_version();
    for (const auto& tied : parameter->tied) tied.unsafeGetTensorImpl()->bump_version();
  }
}

// Values the user wrote since the last update become the masters. (Our kernels see it by themselves; a client's optimizer doesn't.)
void Engine::State::refresh_masters(const std::vector<int>& changed) {
  for (const int id : changed) {
    if (masters->has(id)) flat::copy(masters->domain(id), domain(id));
  }
}

void Engine::State::check_source() {
  if (!options.source) return;
  std::string error;
  for (const auto& [name, tensor] : options.source()) {
    const auto* known = model.find(name);
    if (!known) {
      if (!tensor.requires_grad()) continue;
      error = cat("[engine.step] the module has a new parameter '", name, "' that the engine doesn't train; create it before the engine");
      break;
    }
    const auto* impl = tensor.unsafeGetTensorImpl();
    bool same = known->tensor.unsafeGetTensorImpl() == impl;
    for (const auto& tied : known->tied) same = same || tied.unsafeGetTensorImpl() == impl;
    if (same) continue;
    error = cat(
        "[engine.step] parameter '", name,
        "' was replaced by a new object (load_state_dict(assign=True), or an assignment to the module); "
        "the engine trains the old one. Copy values into the parameter instead: p.data.copy_(value), load_state_dict(...) without assign");
    break;
  }
  agree_no_error(*comm, error, "engine.step");
}

double Engine::compute_grad_norm() {
  auto& s = *state_;
  s.require_alive("compute_grad_norm");
  if (s.comm->world_size() > 1) s.comm->check_all_in("compute_grad_norm");
  const at::NoGradGuard no_grad;
  s.hooks.collect(*s.backward);
  s.set_phase(Phase::reducing, "compute_grad_norm");
  const auto facts = s.drain_and_agree();
  s.set_phase(Phase::idle, "after compute_grad_norm");
  return std::isfinite(facts.squares) ? std::sqrt(facts.squares) * s.gradient_scale() : std::numeric_limits<double>::infinity();
}

}  // namespace unshard
