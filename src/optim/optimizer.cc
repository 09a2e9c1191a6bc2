// The built-in optimizers: state per parameter, kernels of our own on CPU, torch's operators elsewhere.
#include "unshard/optim/optimizer.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cctype>
#include <map>

#include "optim/aten_update.h"
#include "optim/lamb.h"
#include "optim/state.h"
#include "optim/update.h"
#include "unshard/core/error.h"

namespace unshard {
namespace {

std::vector<std::string> names_of(UpdateKind kind) {
  switch (kind) {
    case UpdateKind::adam:
    case UpdateKind::adamw:
    case UpdateKind::lamb:
      return {"exp_avg", "exp_avg_sq"};
    case UpdateKind::sgd:
      return {"momentum_buffer"};
    case UpdateKind::adagrad:
      return {"sum"};
    case UpdateKind::lion:
      break;
  }
  return {"exp_avg"};
}

const char* type_of(UpdateKind kind) {
  constexpr const char* kNames[] = {"adam", "adamw", "sgd", "adagrad", "lion", "lamb"};
  return kNames[static_cast<int>(kind)];
}

kernels::Array array_of(const at::Tensor& tensor) { return {const_cast<void*>(tensor.const_data_ptr()), tensor.scalar_type()}; }

class FusedOptimizer : public Optimizer {
 public:
  explicit FusedOptimizer(UpdateKind kind) : kind_(kind), state_(names_of(kind)) {}

  std::string type() const override { return type_of(kind_); }
  std::vector<std::string> state_names() const override { return state_.names(); }
  std::int64_t state_bytes() const override { return state_.bytes(); }

  std::int64_t step_count(int parameter) const override {
    const auto* entry = state_.find(parameter);
    return entry == nullptr ? 0 : entry->steps;
  }
  void set_step_count(int parameter, std::int64_t steps) override {
    require(steps >= 0, "[optim.", type(), "] step count ", steps, " of parameter ", parameter, "; wanted >= 0");
    state_.entry(parameter).steps = steps;
  }

  at::Tensor state(int parameter, std::string_view name, const at::Tensor& like) override {
    const std::size_t index = state_.index(name);
    if (index == state_.names().size()) return {};
    state_.create({{parameter, like.numel(), like.device(), index, 0}});
    return state_.entry(parameter).values[index];
  }

  void prepare(const std::vector<UpdateItem>& items, const std::vector<GroupOptions>& groups) override {
    std::vector<OptimizerState::Request> requests;
    for (const auto& item : items) request_states(item, group_of(item, groups), requests);
    state_.create(requests);
  }

  void step(const std::vector<UpdateItem>& items, const std::vector<GroupOptions>& groups, const UpdateScale& scale) override {
    const at::NoGradGuard no_grad;
    for (const auto& item : items) {
      check(item);
      group_of(item, groups);
    }
    create_missing(items, groups);
    std::vector<kernels::Update> cpu;
    cpu.reserve(items.size());
    std::map<int, std::vector<AtenUpdate>> elsewhere;  // by group
    std::vector<LambUpdate> lamb;
    RuleCache rules;
    for (const auto& item : items) {
      const GroupOptions& group = groups[static_cast<std::size_t>(item.group)];
      OptimizerState::Entry& entry = state_.entry(item.parameter);
      ++entry.steps;
      if (kind_ == UpdateKind::lamb) {  // every rank names every parameter, if only to add nothing to its norms
        lamb.push_back({&item, entry.values[0], entry.values[1], entry.steps});
        continue;
      }
      if (item.param.numel() == 0) continue;
      const double factor = group.maximize ? -scale.scale : scale.scale;
      if (item.param.is_cpu()) {
        cpu.push_back({item.param.numel(), arrays_of(item, entry, group), rules.get(*this, item.group, entry.steps, group, factor)});
      } else {
        elsewhere[item.group].push_back(aten_update(item, entry, group));
      }
    }
    if (kind_ == UpdateKind::lamb) update_with_lamb(lamb, groups, scale);
    kernels::run_updates(cpu.data(), cpu.size());
    for (const auto& [index, updates] : elsewhere) {
      const GroupOptions& group = groups[static_cast<std::size_t>(index)];
      update_with_aten(kind_, updates, group, group.maximize ? -scale.scale : scale.scale);
    }
  }

 private:
  /// The rule of the last group and step: most items share both, and computing one costs more than updating a tiny item.
  struct RuleCache {
    int group = -1;
    std::int64_t step = -1;
    kernels::Rule rule{};
    const kernels::Rule& get(const FusedOptimizer& owner, int wanted_group, std::int64_t wanted_step, const GroupOptions& options,
                             double factor) {
      if (group != wanted_group || step != wanted_step) rule = owner.rule_of(options, wanted_step, factor);
      group = wanted_group;
      step = wanted_step;
      return rule;
    }
  };

  kernels::Rule rule_of(const GroupOptions& group, std::int64_t step, double factor) const {
    switch (kind_) {
      case UpdateKind::adam:
      case UpdateKind::adamw:
        return kernels::adam_rule({group.lr, group.beta1, group.beta2, group.eps, group.weight_decay, kind_ == UpdateKind::adamw,
                                   group.bias_correction, step, factor});
      case UpdateKind::sgd:
        return kernels::sgd_rule(group.lr, group.momentum, group.dampening, group.weight_decay, group.nesterov,
                                 takes_gradient_as_buffer(step, group), factor);
      case UpdateKind::adagrad:
        return kernels::adagrad_rule(group.lr / (1 + static_cast<double>(step - 1) * group.lr_decay), group.eps, group.weight_decay,
                                     factor);
      case UpdateKind::lion:
      case UpdateKind::lamb:  // lamb.h
        break;
    }
    return kernels::lion_rule(group.lr, group.beta1, group.beta2, group.weight_decay, factor);
  }

  /// torch's first momentum step ignores dampening. Without dampening a zero buffer gives the same, and one loaded without a step count is
  /// kept.
  static bool takes_gradient_as_buffer(std::int64_t step, const GroupOptions& group) { return step == 1 && group.dampening != 0; }

  bool has_states(const GroupOptions& group) const { return kind_ != UpdateKind::sgd || group.momentum != 0; }

  const GroupOptions& group_of(const UpdateItem& item, const std::vector<GroupOptions>& groups) const {
    require(item.group >= 0 && static_cast<std::size_t>(item.group) < groups.size(), "[optim.", type(), "] parameter ", item.parameter,
            " is in group ", item.group, ", but there are ", groups.size(), " groups");
    return groups[static_cast<std::size_t>(item.group)];
  }

  void check(const UpdateItem& item) const {
    const auto fail = [&](const auto&... parts) {
      throw std::invalid_argument(cat("[optim.", type(), ".step] parameter ", item.parameter, ": ", parts...));
    };
    if (!item.param.defined() || !item.grad.defined()) fail("the item has no ", item.param.defined() ? "gradient" : "parameter");
    for (const at::Tensor* tensor : {&item.param, &item.grad}) {
      const auto dtype = tensor->scalar_type();
      if (dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf) {
        fail("dtype ", c10::toString(dtype), "; fp32, bf16 and fp16 are supported");
      }
    }
    const bool wide = item.param.scalar_type() == at::kFloat;
    if (!wide && !item.master.defined()) {
      fail("its dtype is ", c10::toString(item.param.scalar_type()),
           " and it has no fp32 master weights; updating 16-bit weights without masters is not supported");
    }
    if (wide && item.master.defined()) fail("an fp32 parameter is its own master; leave UpdateItem::master undefined");
    if (item.master.defined() && item.master.scalar_type() != at::kFloat) fail("master weights must be fp32");
    for (const at::Tensor* tensor : {&item.param, &item.master, &item.grad}) {
      if (!tensor->defined()) continue;
      if (tensor->numel() != item.param.numel())
        fail("pieces have ", item.param.numel(), " and ", tensor->numel(), " elements; wanted the same");
      if (!tensor->is_contiguous()) fail("pieces must be contiguous");
      if (tensor->device() != item.param.device()) fail("pieces rest on ", item.param.device(), " and ", tensor->device());
    }
  }

  void request_states(const UpdateItem& item, const GroupOptions& group, std::vector<OptimizerState::Request>& requests) const {
    if (!has_states(group)) return;
    for (std::size_t name = 0; name < state_.names().size(); ++name) {
      requests.push_back(
          {item.parameter, item.param.numel(), item.param.device(), name, kind_ == UpdateKind::adagrad ? group.initial_accumulator : 0});
    }
  }

  void create_missing(const std::vector<UpdateItem>& items, const std::vector<GroupOptions>& groups) {
    std::vector<OptimizerState::Request> requests;
    for (const auto& item : items) {
      const auto* entry = state_.find(item.parameter);
      const bool complete = entry != nullptr && std::all_of(entry->values.begin(), entry->values.end(), [&](const at::Tensor& value) {
                              return value.defined() && value.numel() == item.param.numel();
                            });
      if (!complete) request_states(item, groups[static_cast<std::size_t>(item.group)], requests);
    }
    if (!requests.empty()) state_.create(requests);
  }

  kernels::UpdateArrays arrays_of(const UpdateItem& item, const OptimizerState::Entry& entry, const GroupOptions& group) const {
    const auto pointer = [&](std::size_t i) {
      return has_states(group) && i < entry.values.size() ? static_cast<float*>(entry.values[i].mutable_data_ptr()) : nullptr;
    };
    const bool own = !item.master.defined();
    auto* master = static_cast<float*>((own ? item.param : item.master).mutable_data_ptr());
    const kernels::Array param = own ? kernels::Array{} : kernels::Array{item.param.mutable_data_ptr(), item.param.scalar_type()};
    return kernels::update_arrays(type_of(kind_), master, param, array_of(item.grad), pointer(0), pointer(1));
  }

  AtenUpdate aten_update(const UpdateItem& item, const OptimizerState::Entry& entry, const GroupOptions& group) const {
    const bool states = has_states(group);
    return {&item, states ? entry.values[0] : at::Tensor(), states && entry.values.size() > 1 ? entry.values[1] : at::Tensor(), entry.steps,
            kind_ == UpdateKind::sgd && takes_gradient_as_buffer(entry.steps, group)};
  }

  UpdateKind kind_;
  OptimizerState state_;
};

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(const std::string& type, bool decoupled_decay) {
  std::string name = type;
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (name == "adamw") return std::make_unique<FusedOptimizer>(UpdateKind::adamw);
  if (name == "adam") return std::make_unique<FusedOptimizer>(decoupled_decay ? UpdateKind::adamw : UpdateKind::adam);
  if (name == "sgd") return std::make_unique<FusedOptimizer>(UpdateKind::sgd);
  if (name == "adagrad") return std::make_unique<FusedOptimizer>(UpdateKind::adagrad);
  if (name == "lion") return std::make_unique<FusedOptimizer>(UpdateKind::lion);
  if (name == "lamb") return std::make_unique<FusedOptimizer>(UpdateKind::lamb);
  throw std::invalid_argument(cat("[optim.make_optimizer] unknown type \"", type, "\"; known: adam, adamw, sgd, adagrad, lion, lamb"));
}

}  // namespace unshard
