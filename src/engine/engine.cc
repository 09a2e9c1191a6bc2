// The training protocol: forward, backward, step. What happens in an update is in step.cc.
#include "unshard/engine/engine.h"

#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <exception>
#include <utility>

#include "engine_state.h"
#include "save_job.h"
#include "unshard/core/error.h"

namespace unshard {
namespace {
using Clock = std::chrono::steady_clock;
double ms_since(Clock::time_point start) { return std::chrono::duration<double, std::milli>(Clock::now() - start).count(); }
}  // namespace

Engine::Engine(const NamedParameters& parameters, const Config& config, std::shared_ptr<Communicator> comm, EngineOptions options)
    : state_(std::make_unique<State>(parameters, config, std::move(comm), std::move(options))) {}

// No communication here: after an exception the peers may be gone. The store turns what it can back by itself.
Engine::~Engine() {
  if (!state_) return;
  wait_for_files();
  state_->hooks.detach();
  state_->close_timeline();
}

void Engine::State::set_phase(Phase phase, std::string_view detail) { comm->set_phase(phase, detail); }

void Engine::State::require_alive(const char* call) const {
  if (destroyed) throw std::invalid_argument(cat("[engine.", call, "] the engine was destroyed"));
}

void Engine::State::refresh_factor() {
  backward->set_missing_factor((scaler ? scaler->scale() : 1.0) / static_cast<double>(accumulation_steps));
}

void Engine::begin_forward() {
  auto& s = *state_;
  s.require_alive("forward");
  s.comm->timeline().begin_first_step();
  s.backward->forget_running();
  s.set_phase(Phase::forward, {});
  s.store->check_storages();
  s.hooks.refresh(s.backward);
  s.store->begin_forward();
  s.forward_start = Clock::now();
}

void Engine::end_forward() {
  auto& s = *state_;
  s.store->end_forward();
  s.forward_ms += ms_since(s.forward_start);
  if (auto& timeline = s.comm->timeline(); timeline.is_on()) {
    const auto began = std::chrono::duration_cast<std::chrono::nanoseconds>(s.forward_start.time_since_epoch()).count();
    timeline.add(Lane::compute, "forward", {}, -1, began, Timeline::now_ns());
  }
  s.set_phase(Phase::idle, "after forward");
}

at::Tensor Engine::scale(const at::Tensor& loss, bool scale_wrt_gas) {
  auto& s = *state_;
  s.require_alive("scale");
  require(loss.defined() && loss.numel() == 1, "[engine.scale] the loss must be a scalar, got ",
          loss.defined() ? cat("shape ", loss.sizes()) : std::string("nothing"), "; reduce it first (mean or sum)");
  require(loss.requires_grad(),
          "[engine.scale] the loss doesn't require a gradient: no trained parameter took part, or it was computed under no_grad");
  s.hooks.refresh(s.backward);
  // A 16-bit loss times the loss scale would overflow by itself.
  at::Tensor scaled = s.scaler && loss.scalar_type() == c10::kHalf ? loss.to(c10::kFloat) : loss;
  scaled = scaled.mul(s.scaler ? s.scaler->scale() : 1.0);
  const double share = scale_wrt_gas ? 1.0 / static_cast<double>(s.accumulation_steps) : 1.0;
  scaled.register_hook([weak = std::weak_ptr(s.backward), share](const at::Tensor& grad) {
    if (const auto backward = weak.lock()) backward->mark_scaled();
    return share == 1 ? grad : grad.mul(share);
  });
  return scaled;
}

at::Tensor Engine::backward(const at::Tensor& loss, bool retain_graph, bool scale_wrt_gas) {
  auto& s = *state_;
  s.require_alive("backward");
  require(loss.defined() && loss.numel() == 1, "[engine.backward] the loss must be a scalar, got ",
          loss.defined() ? cat("shape ", loss.sizes()) : std::string("nothing"), "; reduce it first (mean or sum)");
  require(loss.requires_grad(),
          "[engine.backward] the loss doesn't require a gradient: no trained parameter took part, or it was computed under no_grad");
  s.hooks.refresh(s.backward);
  const bool divide = scale_wrt_gas && s.accumulation_steps > 1;
  const auto divided = divide ? loss.div(static_cast<double>(s.accumulation_steps)) : loss;
  auto scaled = divided;
  if (s.scaler) scaled = (divided.scalar_type() == c10::kHalf ? divided.to(c10::kFloat) : divided).mul(s.scaler->scale());
  if (loss.device().is_cpu() && !std::isfinite(loss.item<double>())) s.loss_was_bad = true;
  const Backward::Scope scope(*s.backward);
  torch::autograd::backward({scaled}, {}, retain_graph);
  return divided.detach();
}

void Engine::step() { state_->step(); }

void Engine::zero_grad() {
  auto& s = *state_;
  s.require_alive("zero_grad");
  // Right after an update there is nothing to drop on any rank; see [Note: epochs] in reducer.h.
  if (s.micro_steps_since_boundary == 0 && !s.pipeline->any_present()) return;
  s.pipeline->discard();
  s.loss_was_bad = false;
}

bool Engine::State::is_boundary() const {
  const bool counted = (counters.micro_steps + 1) % accumulation_steps == 0;
  return boundary_override.value_or(counted || !config.managed_gradient_accumulation);
}

bool Engine::is_gradient_accumulation_boundary() const { return state_->is_boundary(); }
void Engine::set_gradient_accumulation_boundary(std::optional<bool> value) { state_->boundary_override = value; }

void Engine::set_accumulation_steps(std::int64_t steps) {
  state_->require_alive("set_accumulation_steps");
  require(steps >= 1, "[engine.set_accumulation_steps] got ", steps, "; at least 1 is needed");
  state_->accumulation_steps = steps;
  state_->refresh_factor();
  state_->count_samples();
}

void Engine::set_micro_batch_size(std::int64_t samples) {
  state_->require_alive("set_micro_batch_size");
  require(samples >= 1, "[engine.set_micro_batch_size] got ", samples, "; at least 1 is needed");
  state_->config.batch.micro_batch_size = samples;
  state_->count_samples();
}

// What one update sees, for global_samples.
void Engine::State::count_samples() {
  auto& batch = config.batch;
  batch.accumulation_steps = accumulation_steps;
  batch.train_batch_size = batch.micro_batch_size * batch.accumulation_steps * comm->world_size();
}

void Engine::set_no_sync(bool on) {
  if (on) state_->require_alive("no_sync");
  require(!(on && state_->no_sync), "[engine.no_sync] is already on; it can't be nested");
  state_->no_sync = on;
}

std::optional<double> Engine::last_grad_norm() const { return state_->grad_norm; }
bool Engine::was_step_applied() const { return state_->step_applied; }
bool Engine::overflow() const { return state_->overflowed; }
double Engine::loss_scale() const { return state_->scaler ? state_->scaler->scale() : 1.0; }
std::int64_t Engine::micro_steps() const { return state_->counters.micro_steps; }
std::int64_t Engine::global_steps() const { return state_->counters.global_steps; }
std::int64_t Engine::global_samples() const { return state_->counters.global_samples; }
std::int64_t Engine::skipped_steps() const { return state_->counters.skipped_steps; }
std::int64_t Engine::applied_updates() const { return state_->counters.applied_updates; }
const Config& Engine::config() const { return state_->config; }
Communicator& Engine::comm() const { return *state_->comm; }
ParameterStore& Engine::store() const { return *state_->store; }
std::shared_ptr<ParameterStore> Engine::shared_store() const { return state_->store; }
Optimizer* Engine::optimizer() const { return state_->optimizer.get(); }
std::vector<GroupOptions>& Engine::groups() { return state_->groups; }
LrSchedule* Engine::schedule() const { return state_->schedule.get(); }

void Engine::destroy() {
  auto& s = *state_;
  if (s.destroyed) return;
  std::exception_ptr save_error;  // thrown when everything has been given back
  try {
    s.finish_save();
  } catch (const CheckpointError&) {
    save_error = std::current_exception();
  }
  s.hooks.detach();
  s.store->release_all();
  s.close_timeline();
  s.destroyed = true;
  s.backward.reset();
  s.pipeline.reset();  // the reducer first: its thread uses the gradients
  s.gradients.reset();
  s.masters.reset();
  s.optimizer.reset();
  s.options = {};
  s.model = {};
  if (save_error) std::rethrow_exception(save_error);
}

}  // namespace unshard
