// A torch::optim optimizer behind the engine's interface. It updates leaves of its own that alias this rank's flat pieces.
#include "unshard/engine/torch_optimizer.h"

#include <ATen/core/grad_mode.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <map>
#include <unordered_map>

#include "flat.h"
#include "unshard/core/error.h"

namespace unshard {
namespace {

using torch::optim::OptimizerParamState;

// A per-element state of the optimizers that torch has in C++, by the name that torch's Python uses.
at::Tensor* find_state(OptimizerParamState& state, std::string_view name) {
  const auto pick = [&](std::initializer_list<std::pair<const char*, at::Tensor*>> fields) -> at::Tensor* {
    for (const auto& [field, tensor] : fields) {
      if (name == field) return tensor;
    }
    return nullptr;
  };
  if (auto* adamw = dynamic_cast<torch::optim::AdamWParamState*>(&state)) {
    return pick({{"exp_avg", &adamw->exp_avg()}, {"exp_avg_sq", &adamw->exp_avg_sq()}, {"max_exp_avg_sq", &adamw->max_exp_avg_sq()}});
  }
  if (auto* adam = dynamic_cast<torch::optim::AdamParamState*>(&state)) {
    return pick({{"exp_avg", &adam->exp_avg()}, {"exp_avg_sq", &adam->exp_avg_sq()}, {"max_exp_avg_sq", &adam->max_exp_avg_sq()}});
  }
  if (auto* sgd = dynamic_cast<torch::optim::SGDParamState*>(&state)) return pick({{"momentum_buffer", &sgd->momentum_buffer()}});
  if (auto* adagrad = dynamic_cast<torch::optim::AdagradParamState*>(&state)) return pick({{"sum", &adagrad->sum()}});
  if (auto* rmsprop = dynamic_cast<torch::optim::RMSpropParamState*>(&state)) {
    return pick(
        {{"square_avg", &rmsprop->square_avg()}, {"momentum_buffer", &rmsprop->momentum_buffer()}, {"grad_avg", &rmsprop->grad_avg()}});
  }
  return nullptr;
}

void set_steps(OptimizerParamState& state, std::int64_t steps) {
  if (auto* adamw = dynamic_cast<torch::optim::AdamWParamState*>(&state)) adamw->step(steps);
  if (auto* adam = dynamic_cast<torch::optim::AdamParamState*>(&state)) adam->step(steps);
  if (auto* adagrad = dynamic_cast<torch::optim::AdagradParamState*>(&state)) adagrad->step(steps);
  if (auto* rmsprop = dynamic_cast<torch::optim::RMSpropParamState*>(&state)) rmsprop->step(steps);
}

struct Kind {
  const char* type;
  std::vector<std::string> states;
  std::unique_ptr<OptimizerParamState> (*make)();
};

Kind kind_of(const torch::optim::Optimizer& client) {
  if (dynamic_cast<const torch::optim::AdamW*>(&client)) {
    return {"torch.AdamW", {"exp_avg", "exp_avg_sq"}, []() -> std::unique_ptr<OptimizerParamState> {
              return std::make_unique<torch::optim::AdamWParamState>();
            }};
  }
  if (dynamic_cast<const torch::optim::Adam*>(&client)) {
    return {"torch.Adam", {"exp_avg", "exp_avg_sq"}, []() -> std::unique_ptr<OptimizerParamState> {
              return std::make_unique<torch::optim::AdamParamState>();
            }};
  }
  if (dynamic_cast<const torch::optim::SGD*>(&client)) {
    return {"torch.SGD", {"momentum_buffer"}, []() -> std::unique_ptr<OptimizerParamState> {
              return std::make_unique<torch::optim::SGDParamState>();
            }};
  }
  if (dynamic_cast<const torch::optim::Adagrad*>(&client)) {
    return {"torch.Adagrad", {"sum"}, []() -> std::unique_ptr<OptimizerParamState> {
              return std::make_unique<torch::optim::AdagradParamState>();
            }};
  }
  if (dynamic_cast<const torch::optim::RMSprop*>(&client)) {
    return {"torch.RMSprop", {"square_avg"}, []() -> std::unique_ptr<OptimizerParamState> {
              return std::make_unique<torch::optim::RMSpropParamState>();
            }};
  }
  return {"torch optimizer", {}, nullptr};
}

class TorchOptimizer final : public Optimizer {
 public:
  TorchOptimizer(std::shared_ptr<torch::optim::Optimizer> client) : client_(std::move(client)), kind_(kind_of(*client_)) {
    // Adagrad makes its state when it is built, for the model's parameters; those are not what it will update.
    client_->state().clear();
    for (auto& group : client_->param_groups()) {
      group.params().clear();
      seen_lr_.push_back(group.options().get_lr());
    }
  }

  std::string type() const override { return kind_.type; }
  std::vector<std::string> state_names() const override { return kind_.states; }

  void prepare(const std::vector<UpdateItem>& items, const std::vector<GroupOptions>& /*groups*/) override {
    for (const auto& item : items) leaf(item);
  }

  void step(const std::vector<UpdateItem>& items, const std::vector<GroupOptions>& groups, const UpdateScale& scale) override {
    const at::NoGradGuard no_grad;
    follow_schedule(groups);
    for (auto& [id, entry] : leaves_) entry.tensor.mutable_grad().reset();
    for (const auto& item : items) {
      auto& entry = leaf(item);
      auto grad = flat::empty(item.grad.numel(), c10::kFloat, item.grad.device());
      flat::copy(grad, item.grad, scale.scale);
      entry.tensor.mutable_grad() = grad;
      ++entry.steps;
    }
    client_->step();
    for (const auto& item : items) {
      leaves_.at(item.parameter).tensor.mutable_grad().reset();
      if (item.master.defined()) flat::copy(item.param, item.master);
    }
  }

  at::Tensor state(int parameter, std::string_view name, const at::Tensor& /*like*/) override {
    const auto entry = leaves_.find(parameter);
    if (entry == leaves_.end() || !kind_.make) return {};
    auto* tensor = find_state(state_of(entry->second.tensor), name);
    return tensor ? *tensor : at::Tensor();
  }

  std::int64_t step_count(int parameter) const override {
    const auto entry = leaves_.find(parameter);
    return entry == leaves_.end() ? 0 : entry->second.steps;
  }
  void set_step_count(int parameter, std::int64_t steps) override {
    const auto entry = leaves_.find(parameter);
    require(entry != leaves_.end(), "[optim.", type(), "] parameter ", parameter, " is not one of this optimizer's");
    entry->second.steps = steps;
    if (kind_.make) set_steps(state_of(entry->second.tensor), steps);
  }

  std::int64_t state_bytes() const override {
    std::int64_t bytes = 0;
    for (auto& [impl, state] : client_->state()) {
      for (const auto& name : kind_.states) {
        if (const auto* tensor = find_state(*state, name); tensor && tensor->defined()) bytes += tensor->numel() * 4;
      }
    }
    return bytes;
  }

 private:
  struct Leaf {
    at::Tensor tensor;
    std::int64_t steps = 0;
  };

  // The client keys its state by the tensor's identity: one leaf a parameter for good, put on new memory when the piece has moved.
  Leaf& leaf(const UpdateItem& item) {
    const at::Tensor& weights = item.master.defined() ? item.master : item.param;
    require(weights.scalar_type() == c10::kFloat, "[optim.", type(), "] updates fp32 weights; parameter ", item.parameter, " has dtype ",
            weights.scalar_type());
    auto [at, fresh] = leaves_.try_emplace(item.parameter);
    auto& tensor = at->second.tensor;
    if (fresh) {
      tensor = weights.detach();
      tensor.set_requires_grad(true);
      client_->param_groups().at(static_cast<std::size_t>(item.group)).params().push_back(tensor);
      if (dynamic_cast<torch::optim::Adagrad*>(client_.get())) start_adagrad(tensor, item.group);
    } else if (tensor.data_ptr() != weights.data_ptr()) {
      tensor.set_data(weights.detach());
    }
    return at->second;
  }

  void start_adagrad(const at::Tensor& tensor, int group) {
    const auto& options = static_cast<torch::optim::AdagradOptions&>(client_->param_groups().at(static_cast<std::size_t>(group)).options());
    auto state = std::make_unique<torch::optim::AdagradParamState>();
    state->step(0);
    auto sum = flat::zeros(tensor.numel(), c10::kFloat, tensor.device());
    sum.fill_(options.initial_accumulator_value());
    state->sum(sum);
    client_->state()[tensor.unsafeGetTensorImpl()] = std::move(state);
  }

  OptimizerParamState& state_of(const at::Tensor& tensor) {
    auto& state = client_->state()[tensor.unsafeGetTensorImpl()];
    if (state) return *state;
    // The client takes a state that exists for a complete one.
    state = kind_.make();
    for (const char* name : {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg", "grad_avg"}) {
      if (auto* value = find_state(*state, name)) *value = flat::zeros(tensor.numel(), c10::kFloat, tensor.device());
    }
    set_steps(*state, 0);
    return *state;
  }

  // Rates are the client's own, until a schedule of the engine moves them.
  void follow_schedule(const std::vector<GroupOptions>& groups) {
    for (std::size_t g = 0; g < groups.size() && g < seen_lr_.size(); ++g) {
      if (groups[g].lr == seen_lr_[g]) continue;
      client_->param_groups()[g].options().set_lr(groups[g].lr);
      seen_lr_[g] = groups[g].lr;
    }
  }

  const std::shared_ptr<torch::optim::Optimizer> client_;
  const Kind kind_;
  std::map<int, Leaf> leaves_;   // by parameter id
  std::vector<double> seen_lr_;  // by group: the engine's rate when last looked at
};

}  // namespace

std::vector<ParamGroup> groups_of(const torch::optim::Optimizer& client, const NamedParameters& parameters) {
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  for (const auto& [name, tensor] : parameters) names.emplace(tensor.unsafeGetTensorImpl(), name);
  std::vector<ParamGroup> groups;
  for (const auto& group : client.param_groups()) {
    ParamGroup named;
    named.options.lr = group.options().get_lr();
    for (const auto& tensor : group.params()) {
      const auto at = names.find(tensor.unsafeGetTensorImpl());
      require(at != names.end(), "[engine.groups_of] the optimizer has a parameter of shape ", tensor.sizes(),
              " that is not among the model's");
      named.names.push_back(at->second);
    }
    groups.push_back(std::move(named));
  }
  return groups;
}

std::shared_ptr<Optimizer> wrap_torch_optimizer(std::shared_ptr<torch::optim::Optimizer> client, const NamedParameters& parameters) {
  require(client != nullptr, "[engine.wrap_torch_optimizer] no optimizer");
  groups_of(*client, parameters);  // checks that it was built on this model
  return std::make_shared<TorchOptimizer>(std::move(client));
}

}  // namespace unshard
