// Inference, moving states off the device, and the accounts: bytes, times, dtypes.
#include <algorithm>
#include <set>
#include <sstream>

#include "engine_state.h"
#include "unshard/core/dtype.h"
#include "unshard/core/error.h"

namespace unshard {
namespace {

const std::vector<std::string> kStateKinds{"optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer"};

}  // namespace

void Engine::enter_inference() {
  auto& s = *state_;
  s.require_alive("enter_inference");
  require(!s.inference, "[engine.enter_inference] is already in inference mode");
  s.store->enter_inference();
  s.inference = true;
}

void Engine::leave_inference() {
  auto& s = *state_;
  if (!s.inference) return;
  s.store->leave_inference();
  s.inference = false;
}

void Engine::State::move_states(c10::Device device) {
  if (moved.contains("hp_params")) masters->move_to(device);
  if (moved.contains("lp_grads") || moved.contains("contiguous_grad_buffer")) gradients->move_to(device);
  if (!moved.contains("optim_states") || !optimizer) return;
  for (const auto& parameter : model.parameters()) {
    if (!parameter.is_trained() || !parameter.active) continue;
    for (const auto& name : optimizer->state_names()) {
      auto value = state_domain(parameter.id, name);
      if (value.defined() && value.device() != device) value.set_data(value.to(device));
    }
  }
}

void Engine::offload_states(const std::vector<std::string>& include, const std::string& device) {
  auto& s = *state_;
  s.require_alive("offload_states");
  require(device == "cpu", "[engine.offload_states] device \"", device, "\"; accepted: \"cpu\"");
  for (const auto& kind : include) {
    require(std::find(kStateKinds.begin(), kStateKinds.end(), kind) != kStateKinds.end(), "[engine.offload_states] unknown state \"", kind,
            "\"; accepted: optim_states, hp_params, lp_params, lp_grads, contiguous_grad_buffer");
  }
  require(!s.pipeline->any_present(),
          "[engine.offload_states] gradients of an unfinished accumulation are held; call step() or zero_grad() first");
  const auto& kinds = include.empty() ? kStateKinds : include;
  s.moved.insert(kinds.begin(), kinds.end());
  s.move_states(c10::kCPU);
}

void Engine::reload_states() {
  state_->require_alive("reload_states");
  state_->reload();
}

void Engine::State::reload() {
  if (moved.empty()) return;
  move_states(model.device());
  moved.clear();
}

MemoryReport Engine::memory() const {
  const auto& s = *state_;
  MemoryReport report;
  if (s.destroyed) return report;
  const auto at_rest = s.store->bytes();
  const bool grads_moved = s.moved.contains("lp_grads") || s.moved.contains("contiguous_grad_buffer");
  // Parameters rest where the store has them; on a CPU machine that is host memory anyway.
  report.parameters = s.moved.contains("lp_params") && s.model.device().is_cpu() ? 0 : at_rest.parameters;
  report.padding = at_rest.padding;
  report.gradients = grads_moved ? 0 : s.gradients->bytes();
  if (!s.moved.contains("hp_params")) report.optimizer += s.masters->bytes();
  if (s.optimizer && !s.moved.contains("optim_states")) report.optimizer += s.optimizer->state_bytes();
  report.buckets = s.pipeline->reducer().bytes();
  report.gathered = s.store->stats().live_bytes;

  // ZeRO's arithmetic. Accumulated gradients are kept as own pieces from stage 1 on: like stage 2, at no cost.
  const std::int64_t world = s.comm->world_size(), stage = s.config.zero.stage;
  const auto states = s.optimizer ? static_cast<std::int64_t>(s.optimizer->state_names().size()) * 4 : 0;
  const auto grad_bytes = static_cast<std::int64_t>(c10::elementSize(s.gradients->dtype()));
  std::int64_t parameters = 0, gradients = 0, optimizer = 0;
  for (const auto& parameter : s.model.parameters()) {
    const auto& info = s.store->info(parameter.id);
    const auto numel = parameter.layout.numel;
    const auto bytes = numel * static_cast<std::int64_t>(c10::elementSize(parameter.dtype));
    parameters += info.partitioned ? bytes / world : bytes;
    if (!parameter.active) continue;
    gradients += numel * grad_bytes;
    optimizer += numel * (states + (parameter.dtype == c10::kFloat ? 0 : 4));
    const auto padding =
        s.keeps_whole() ? parameter.layout.padded_numel() - numel : parameter.layout.shard_numel() - parameter.layout.size(s.comm->rank());
    report.padding += padding * grad_bytes;
  }
  report.formula = parameters + (stage >= 1 ? (gradients + optimizer) / world : gradients + optimizer);
  return report;
}

StepTimes Engine::times() const { return state_->times; }

std::string Engine::dtype_table() const {
  const auto& s = *state_;
  s.require_alive("dtype_table");
  std::set<std::string> parameters, communication, masters;
  for (const auto& parameter : s.model.parameters()) {
    parameters.insert(dtype_name(parameter.dtype));
    if (!parameter.is_trained()) continue;
    communication.insert(dtype_name(s.config.communication_dtype.value_or(parameter.dtype)));
    masters.insert(parameter.dtype == c10::kFloat ? "the parameter itself (fp32)" : "fp32");
  }
  const auto join = [](const std::set<std::string>& names) {
    std::string text;
    for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
    return text.empty() ? std::string("none") : text;
  };
  std::ostringstream table;
  table << "parameters              " << join(parameters) << '\n'
        << "gradient communication  " << join(communication) << '\n'
        << "gradient accumulation   " << dtype_name(s.gradients->dtype()) << '\n'
        << "master weights          " << join(masters) << '\n'
        << "optimizer states        " << (s.optimizer ? "fp32" : "none") << '\n'
        << "buffers                 as they are in the model\n";
  return table.str();
}

}  // namespace unshard
