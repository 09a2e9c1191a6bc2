#include "backward.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

#include "gradient_pipeline.h"
#include "unshard/comm/communicator.h"
#include "unshard/comm/host_group.h"

namespace unshard {
namespace {

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point start) { return std::chrono::duration<double, std::milli>(Clock::now() - start).count(); }

void record(Communicator& comm, Clock::time_point start) {
  auto& timeline = comm.timeline();
  if (!timeline.is_on()) return;
  const auto began = std::chrono::duration_cast<std::chrono::nanoseconds>(start.time_since_epoch()).count();
  timeline.add(Lane::compute, "backward", {}, -1, began, Timeline::now_ns());
}

// The engine's own copies are no business of the user's tracers and modes.
const c10::DispatchKeySet kUserModes({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                                      c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode,
                                      c10::DispatchKey::Functionalize});

void set_phase(Communicator& comm, Phase phase, std::string_view detail) { comm.set_phase(phase, detail); }

}  // namespace

Backward::Backward(GradientPipeline& pipeline, Communicator& comm, std::vector<std::string> names)
    : pipeline_(pipeline), comm_(comm), names_(std::move(names)) {}

bool Backward::is_scaled() const { return scopes_ > 0 || task_scaled_; }

// Autograd tells the end of a pass to callbacks that were queued while it ran. Passes nest (reentrant checkpointing) and run side by side.
void Backward::enter_task() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task < 0) return;
  const std::lock_guard lock(mutex_);
  if (tasks_.empty() && scopes_ == 0) started_ = Clock::now();
  if (!tasks_.insert(task).second) return;
  torch::autograd::Engine::get_default_engine().queue_callback([self = weak_from_this(), task] {
    if (const auto backward = self.lock()) backward->leave_task(task);
  });
}

void Backward::leave_task(int task) {
  const std::lock_guard lock(mutex_);
  tasks_.erase(task);
  if (!tasks_.empty()) return;
  last_scaled_ = is_scaled();
  task_scaled_ = false;
  if (scopes_ > 0) return;
  ++passes_;
  ms_ += ms_since(started_);
  record(comm_, started_);
  set_phase(comm_, Phase::idle, "after backward");
  if (auto* host = comm_.host()) host->notify();
}

void Backward::on_gradient(int parameter, const at::Tensor& grad) {
  enter_task();
  bool scaled = false;
  {
    const std::lock_guard lock(mutex_);
    scaled = tasks_.empty() && scopes_ == 0 ? last_scaled_ : is_scaled();
  }
  set_phase(comm_, Phase::backward, names_[parameter]);
  const c10::impl::ExcludeDispatchKeyGuard no_modes(kUserModes);
  pipeline_.contribute(parameter, grad, scaled ? 1 : missing_factor_);
}

void Backward::mark_scaled() {
  enter_task();
  const std::lock_guard lock(mutex_);
  task_scaled_ = true;
}

void Backward::forget_running() {
  const std::lock_guard lock(mutex_);
  tasks_.clear();
  task_scaled_ = false;
}

double Backward::take_ms() {
  const std::lock_guard lock(mutex_);
  return std::exchange(ms_, 0.0);
}

int Backward::take_passes() {
  const std::lock_guard lock(mutex_);
  return std::exchange(passes_, 0);
}

Backward::Scope::Scope(Backward& backward) : backward_(backward), start_(Clock::now()) {
  {
    const std::lock_guard lock(backward_.mutex_);
    if (backward_.scopes_++ == 0) {
      backward_.tasks_.clear();
      backward_.task_scaled_ = false;
    }
  }
  set_phase(backward_.comm_, Phase::backward, "start of backward");
}

Backward::Scope::~Scope() {
  {
    const std::lock_guard lock(backward_.mutex_);
    backward_.last_scaled_ = true;
    if (--backward_.scopes_ > 0) return;
    ++backward_.passes_;
    backward_.tasks_.clear();
    backward_.ms_ += ms_since(start_);
    record(backward_.comm_, start_);
  }
  set_phase(backward_.comm_, Phase::idle, "after backward");
  if (auto* host = backward_.comm_.host()) host->notify();
}

}  // namespace unshard
