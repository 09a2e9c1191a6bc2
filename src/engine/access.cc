// Whole tensors and this rank's pieces of parameters, gradients and optimizer states.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/where.h>

#include <algorithm>

#include "engine_state.h"
#include "flat.h"
#include "unshard/core/error.h"

namespace unshard {

at::Tensor Engine::State::domain(int id) { return keeps_whole() ? store->whole_if_local(id) : store->own_slice(id); }
at::Tensor Engine::State::piece(int id) { return store->own_slice(id); }

// [numel] of all ranks' pieces, new memory.
at::Tensor Engine::State::gather_pieces(const at::Tensor& piece, const ModelParameter& parameter, const char* what) {
  const auto shard = parameter.layout.shard_numel();
  const int world = comm->world_size();
  auto whole = flat::empty(shard * world, piece.scalar_type(), piece.device());
  if (world == 1) {
    flat::copy(flat::slice(whole, 0, piece.numel()), piece);
  } else if (shard > 0) {
    auto padded = flat::zeros(shard, piece.scalar_type(), piece.device());
    flat::copy(flat::slice(padded, 0, piece.numel()), piece);
    comm->all_gather(whole, padded, cat(what, " of ", parameter.name));
  }
  return flat::slice(whole, 0, parameter.layout.numel);
}

// Flat in storage order -> the parameter's shape (and strides), same memory.
at::Tensor Engine::State::shaped(const at::Tensor& flat, const ModelParameter& parameter) const {
  return at::as_strided(flat, parameter.geometry.sizes, parameter.geometry.strides);
}

// A value of the parameter's shape -> fp32, flat in storage order, new memory.
at::Tensor Engine::State::flattened(const at::Tensor& value, const ModelParameter& parameter, const char* where) const {
  require(value.defined() && value.sizes() == at::IntArrayRef(parameter.geometry.sizes), "[engine.", where, "] parameter '", parameter.name,
          "' has shape ", at::IntArrayRef(parameter.geometry.sizes), ", the value ",
          value.defined() ? cat(value.sizes()) : std::string("is undefined"));
  const at::NoGradGuard no_grad;
  auto ordered = at::empty_strided(parameter.geometry.sizes, parameter.geometry.strides,
                                   at::TensorOptions().dtype(c10::kFloat).device(parameter.tensor.device()));
  ordered.copy_(value);
  return flat::storage_view(ordered);
}

at::Tensor Engine::State::own_part(const at::Tensor& domain, const ModelParameter& parameter) const {
  if (!keeps_whole()) return domain;
  return flat::slice(domain, parameter.layout.begin(comm->rank()), parameter.layout.size(comm->rank()));
}

void Engine::State::write_domain(const at::Tensor& domain, const at::Tensor& flat, const ModelParameter& parameter) {
  const auto rank = comm->rank();
  flat::copy(domain, keeps_whole() ? flat : flat::slice(flat, parameter.layout.begin(rank), parameter.layout.size(rank)));
}

// This rank's flat piece, given by the user -> what write targets of the domain's length take: at stage 0 the whole (collective).
at::Tensor Engine::State::from_pieces(const at::Tensor& piece, const ModelParameter& parameter, const char* where) {
  const auto expected = parameter.layout.size(comm->rank());
  require(piece.defined() && piece.numel() == expected, "[engine.", where, "] this rank's piece of parameter '", parameter.name, "' has ",
          expected, " elements, the value ", piece.defined() ? piece.numel() : 0);
  const auto flat = piece.detach().to(parameter.tensor.device(), c10::kFloat).contiguous().view(-1);
  return keeps_whole() ? gather_pieces(flat, parameter, where) : flat;
}

// Where the 16-bit parameter isn't what its master rounds to, the user wrote it: the master follows. (Before an update the kernels do
// this.)
void Engine::State::take_edits(int id) {
  if (!masters->has(id)) return;
  const auto master = masters->domain(id), shown = domain(id);
  const auto edited = at::ne(shown, master.to(shown.device(), shown.scalar_type()));
  master.copy_(at::where(edited, shown.to(c10::kFloat), master.to(shown.device())));
}

// A rank that calls alone is named within options.collective_check instead of waiting for peers that never come.
const ModelParameter& Engine::State::enter_collective(const char* call, int id) const {
  require_alive(call);
  const auto& parameter = model.at(id, call);
  if (comm->world_size() > 1) comm->check_all_in(cat(call, "('", parameter.name, "')"));
  return parameter;
}

void Engine::State::drain_for_access() {
  hooks.collect(*backward);
  pipeline->drain(*comm);
}

at::Tensor Engine::State::state_domain(int id, const std::string& name) {
  const auto* parameter = model.find(id);
  if (!optimizer || !parameter || !parameter->is_trained()) return {};
  const auto like = masters->has(id) ? masters->domain(id) : domain(id);
  return optimizer->state(id, name, like.scalar_type() == c10::kFloat ? like : flat::empty(like.numel(), c10::kFloat, like.device()));
}

at::Tensor Engine::full_fp32_param(int id) {
  auto& s = *state_;
  const auto& parameter = s.enter_collective("full_fp32_param", id);
  const at::NoGradGuard no_grad;
  s.refresh_masters(s.store->settle());
  s.take_edits(id);
  if (!s.masters->has(id)) return parameter.tensor.detach().clone().to(c10::kFloat);
  const auto whole = s.keeps_whole() ? s.masters->domain(id).clone() : s.gather_pieces(s.masters->piece(id), parameter, "fp32 value");
  return s.shaped(whole, parameter);
}

at::Tensor Engine::full_grad(int id) {
  auto& s = *state_;
  const auto& parameter = s.enter_collective("full_grad", id);
  const at::NoGradGuard no_grad;
  s.drain_for_access();
  const std::uint8_t mine = s.pipeline->present()[id];
  const auto all = exchange_bytes(*s.comm, &mine, 1, "full_grad");
  if (std::all_of(all.begin(), all.end(), [](std::byte flag) { return flag == std::byte{0}; })) return {};
  const auto sum = s.keeps_whole() ? s.gradients->domain(id) : s.gather_pieces(s.gradients->piece(id), parameter, "gradient");
  auto mean = flat::empty(parameter.layout.numel, c10::kFloat, sum.device());
  flat::copy(mean, sum, s.gradient_scale());
  return s.shaped(mean, parameter);
}

at::Tensor Engine::full_state(int id, const std::string& name) {
  auto& s = *state_;
  const auto& parameter = s.enter_collective("full_state", id);
  const at::NoGradGuard no_grad;
  if (name == "step" && s.optimizer && parameter.is_trained())
    return at::full({}, static_cast<double>(s.optimizer->step_count(id)), c10::kFloat);
  const auto state = s.state_domain(id, name);
  if (!state.defined()) return {};
  return s.shaped(s.keeps_whole() ? state.clone() : s.gather_pieces(state, parameter, name.c_str()), parameter);
}

void Engine::set_full_fp32_param(int id, const at::Tensor& value) {
  auto& s = *state_;
  const auto& parameter = s.enter_collective("set_full_fp32_param", id);
  const auto flat = s.flattened(value, parameter, "set_full_fp32_param");
  const at::NoGradGuard no_grad;
  s.refresh_masters(s.store->settle());
  if (s.masters->has(id)) s.write_domain(s.masters->domain(id), flat, parameter);
  const auto target = s.domain(id);
  if (flat::is_supported(target.scalar_type())) {
    s.write_domain(target, flat, parameter);
  } else {
    const auto rank = s.comm->rank();
    target.copy_(s.keeps_whole() ? flat : flat::slice(flat, parameter.layout.begin(rank), parameter.layout.size(rank)));
  }
  s.store->publish_one(id);
}

void Engine::set_full_grad(int id, const at::Tensor& value) {
  auto& s = *state_;
  const auto& parameter = s.enter_collective("set_full_grad", id);
  require(parameter.is_trained(), "[engine.set_full_grad] parameter '", parameter.name, "' is not trained: it is in no group");
  const auto flat = s.flattened(value, parameter, "set_full_grad");
  const at::NoGradGuard no_grad;
  s.drain_for_access();
  s.gradients->ensure(id);
  const auto domain = s.gradients->domain(id);
  const auto rank = s.comm->rank();
  flat::copy(domain, s.keeps_whole() ? flat : flat::slice(flat, parameter.layout.begin(rank), parameter.layout.size(rank)),
             1 / s.gradient_scale());
  s.pipeline->mark_present(id);
  if (s.comm->world_size() > 1) s.comm->barrier("set_full_grad");
}

void Engine::set_full_state(int id, const std::string& name, const at::Tensor& value) {
  auto& s = *state_;
  s.require_alive("set_full_state");
  const auto& parameter = s.model.at(id, "set_full_state");
  const at::NoGradGuard no_grad;
  if (name == "step" && s.optimizer && parameter.is_trained()) {
    s.optimizer->set_step_count(id, static_cast<std::int64_t>(value.item<double>()));
    return;
  }
  const auto state = s.state_domain(id, name);
  require(state.defined(), "[engine.set_full_state] parameter '", parameter.name, "' has no optimizer state '", name, "'");
  s.write_domain(state, s.flattened(value, parameter, "set_full_state"), parameter);
}

at::Tensor Engine::local_fp32_param(int id) {
  auto& s = *state_;
  s.require_alive("local_fp32_param");
  s.model.at(id, "local_fp32_param");
  const at::NoGradGuard no_grad;
  s.take_edits(id);
  if (s.masters->has(id)) return s.masters->piece(id);
  const auto piece = s.piece(id);
  return piece.scalar_type() == c10::kFloat ? piece : piece.to(c10::kFloat);
}

at::Tensor Engine::local_grad(int id) {
  auto& s = *state_;
  const auto& parameter = s.enter_collective("local_grad", id);
  const at::NoGradGuard no_grad;
  s.drain_for_access();
  const std::uint8_t mine = s.pipeline->present()[id];
  const auto all = exchange_bytes(*s.comm, &mine, 1, "local_grad");
  if (std::all_of(all.begin(), all.end(), [](std::byte flag) { return flag == std::byte{0}; })) return {};
  auto mean = flat::empty(parameter.layout.size(s.comm->rank()), c10::kFloat, parameter.tensor.device());
  flat::copy(mean, s.gradients->piece(id), s.gradient_scale());
  return mean;
}

at::Tensor Engine::local_state(int id, const std::string& name) {
  auto& s = *state_;
  s.require_alive("local_state");
  const auto& parameter = s.model.at(id, "local_state");
  const auto state = s.state_domain(id, name);
  return state.defined() ? s.own_part(state, parameter) : at::Tensor();
}

void Engine::set_local_fp32_param(int id, const at::Tensor& value) {
  auto& s = *state_;
  const auto& parameter = s.enter_collective("set_local_fp32_param", id);
  const at::NoGradGuard no_grad;
  s.refresh_masters(s.store->settle());
  const auto flat = s.from_pieces(value, parameter, "set_local_fp32_param");
  if (s.masters->has(id)) flat::copy(s.masters->domain(id), flat);
  s.domain(id).copy_(flat);
  s.store->publish_one(id);
}

void Engine::set_local_grad(int id, const at::Tensor& value) {
  auto& s = *state_;
  const auto& parameter = s.enter_collective("set_local_grad", id);
  require(parameter.is_trained(), "[engine.set_local_grad] parameter '", parameter.name, "' is not trained: it is in no group");
  const at::NoGradGuard no_grad;
  s.drain_for_access();
  s.gradients->ensure(id);
  flat::copy(s.gradients->domain(id), s.from_pieces(value, parameter, "set_local_grad"), 1 / s.gradient_scale());
  s.pipeline->mark_present(id);
  if (s.comm->world_size() > 1) s.comm->barrier("set_local_grad");
}

void Engine::set_local_state(int id, const std::string& name, const at::Tensor& value) {
  auto& s = *state_;
  if (!s.keeps_whole()) s.require_alive("set_local_state");
  const auto& parameter = s.keeps_whole() ? s.enter_collective("set_local_state", id) : s.model.at(id, "set_local_state");
  const at::NoGradGuard no_grad;
  const auto state = s.state_domain(id, name);
  require(state.defined(), "[engine.set_local_state] parameter '", parameter.name, "' has no optimizer state '", name, "'");
  flat::copy(state, s.from_pieces(value, parameter, "set_local_state"));
}

}  // namespace unshard
