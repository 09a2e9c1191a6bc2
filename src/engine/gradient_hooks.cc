#include "gradient_hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <utility>

namespace unshard {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// Post hooks run outside the lock under which AccumulateGrad adds, so another backward thread may be adding to `.grad` just now. Taking
// it under the node's own lock gives each gradient to exactly one hook. The member is protected: it is named through a derived class.
struct NodeAccess : Node {
  static std::mutex& mutex(Node& node) { return node.*(&NodeAccess::mutex_); }
};

at::Tensor take(Node* node, const at::Tensor& parameter) {
  std::unique_lock<std::mutex> lock;
  if (node) lock = std::unique_lock(NodeAccess::mutex(*node));
  at::Tensor grad = parameter.grad();
  if (grad.defined()) parameter.mutable_grad().reset();
  return grad;
}

struct TakeGradient : torch::autograd::FunctionPostHook {
  TakeGradient(std::weak_ptr<GradientReceiver> receiver, int id, Node* node, const at::Tensor& parameter)
      : receiver(std::move(receiver)), id(id), node(node), parameter(parameter.getIntrusivePtr()) {}

  variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
    const auto target = receiver.lock();
    const auto impl = parameter.lock();
    if (!target || !impl) return outputs;
    const auto grad = take(node, at::Tensor(impl));
    if (grad.defined()) target->on_gradient(id, grad);
    return outputs;
  }

  std::weak_ptr<GradientReceiver> receiver;
  const int id;
  Node* const node;  // the one this hook sits on
  c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl> parameter;
};

using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const torch::autograd::Variable&>()));

}  // namespace

struct GradientHooks::Watched {
  int id;
  at::Tensor parameter;
  NodePtr node{};  // kept alive: torch holds accumulators weakly
  std::uintptr_t key = 0;
};

GradientHooks::GradientHooks() = default;
GradientHooks::~GradientHooks() { detach(); }

void GradientHooks::watch(int id, const at::Tensor& parameter) { watched_.push_back({id, parameter}); }

void GradientHooks::refresh(const std::shared_ptr<GradientReceiver>& receiver) {
  for (auto& watched : watched_) {
    if (!watched.parameter.requires_grad() || !watched.parameter.is_leaf()) continue;
    auto node = torch::autograd::impl::try_get_grad_accumulator(watched.parameter);
    if (node && node == watched.node) continue;
    if (!node) node = torch::autograd::impl::grad_accumulator(watched.parameter);
    watched.key = node->add_post_hook(std::make_unique<TakeGradient>(receiver, watched.id, node.get(), watched.parameter));
    watched.node = std::move(node);
  }
}

void GradientHooks::collect(GradientReceiver& receiver) {
  for (const auto& watched : watched_) {
    if (!watched.parameter.grad().defined()) continue;
    if (const auto grad = take(watched.node ? watched.node.get() : nullptr, watched.parameter); grad.defined()) {
      receiver.on_gradient(watched.id, grad);
    }
  }
}

void GradientHooks::detach() {
  for (auto& watched : watched_) {
    if (watched.node) watched.node->del_post_hook(watched.key);
  }
  watched_.clear();
}

}  // namespace unshard
