#include "optim/aten_update.h"

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>

namespace unshard {
namespace {

using Tensors = std::vector<at::Tensor>;

at::Tensor gradient_of(const UpdateItem& item, double scale) { return item.grad.to(at::kFloat).mul(scale); }

/// The lists that torch's fused operators take.
struct Lists {
  Tensors weights, grads, first, second, steps;
};
Lists lists_of(const std::vector<AtenUpdate>& updates, double scale) {
  Lists lists;
  for (const auto& update : updates) {
    lists.weights.push_back(refreshed_weights(*update.item));
    lists.grads.push_back(gradient_of(*update.item, scale));
    lists.first.push_back(update.first);
    lists.second.push_back(update.second);
    lists.steps.push_back(at::full({}, static_cast<double>(update.step), lists.weights.back().options()));
  }
  return lists;
}

void fused_adam(UpdateKind kind, const std::vector<AtenUpdate>& updates, const GroupOptions& group, double scale) {
  const Lists lists = lists_of(updates, scale);
  if (kind == UpdateKind::adamw) {
    at::_fused_adamw_(lists.weights, lists.grads, lists.first, lists.second, {}, lists.steps, group.lr, group.beta1, group.beta2,
                      group.weight_decay, group.eps, false, false);
  } else {
    at::_fused_adam_(lists.weights, lists.grads, lists.first, lists.second, {}, lists.steps, group.lr, group.beta1, group.beta2,
                     group.weight_decay, group.eps, false, false);
  }
}

/// Adam without bias correction, which torch's fused operators lack.
void plain_adam(UpdateKind kind, const AtenUpdate& update, const GroupOptions& group, double scale) {
  const at::Tensor weights = refreshed_weights(*update.item);
  at::Tensor grad = gradient_of(*update.item, scale);
  if (kind == UpdateKind::adam && group.weight_decay != 0) grad.add_(weights, group.weight_decay);
  if (kind == UpdateKind::adamw) weights.mul_(1 - group.lr * group.weight_decay);
  update.first.lerp_(grad, 1 - group.beta1);
  update.second.mul_(group.beta2).addcmul_(grad, grad, 1 - group.beta2);
  weights.addcdiv_(update.first, update.second.sqrt().add_(group.eps), -group.lr);
}

void fused_sgd(const std::vector<AtenUpdate>& updates, const GroupOptions& group, double scale) {
  Lists lists = lists_of(updates, scale);
  if (group.momentum == 0) lists.first.clear();
  at::_fused_sgd_(lists.weights, lists.grads, lists.first, group.weight_decay, group.momentum, group.lr, group.dampening, group.nesterov,
                  false, updates.front().first_step);
}

void adagrad(const AtenUpdate& update, const GroupOptions& group, double scale) {
  const at::Tensor weights = refreshed_weights(*update.item);
  at::Tensor grad = gradient_of(*update.item, scale);
  if (group.weight_decay != 0) grad.add_(weights, group.weight_decay);
  update.first.addcmul_(grad, grad);
  weights.addcdiv_(grad, update.first.sqrt().add_(group.eps), -group.lr / (1 + static_cast<double>(update.step - 1) * group.lr_decay));
}

void lion(const AtenUpdate& update, const GroupOptions& group, double scale) {
  const at::Tensor weights = refreshed_weights(*update.item), grad = gradient_of(*update.item, scale);
  const at::Tensor direction = update.first.mul(group.beta1).add_(grad, 1 - group.beta1).sign_();
  weights.mul_(1 - group.lr * group.weight_decay).sub_(direction, group.lr);
  update.first.mul_(group.beta2).add_(grad, 1 - group.beta2);
}

void update_batch(UpdateKind kind, const std::vector<AtenUpdate>& updates, const GroupOptions& group, double scale) {
  switch (kind) {
    case UpdateKind::adam:
    case UpdateKind::adamw:
      if (group.bias_correction) {
        fused_adam(kind, updates, group, scale);
      } else {
        for (const auto& update : updates) plain_adam(kind, update, group, scale);
      }
      break;
    case UpdateKind::sgd:
      fused_sgd(updates, group, scale);
      break;
    case UpdateKind::adagrad:
      for (const auto& update : updates) adagrad(update, group, scale);
      break;
    case UpdateKind::lion:
      for (const auto& update : updates) lion(update, group, scale);
      break;
    case UpdateKind::lamb:
      break;  // lamb.h
  }
  for (const auto& update : updates) {
    if (update.item->master.defined()) update.item->param.copy_(update.item->master);
  }
}

}  // namespace

at::Tensor refreshed_weights(const UpdateItem& item) {
  if (!item.master.defined()) return item.param;
  const at::Tensor edited = item.param.ne(item.master.to(item.param.scalar_type()));
  item.master.copy_(at::where(edited, item.param.to(at::kFloat), item.master));
  return item.master;
}

void update_with_aten(UpdateKind kind, const std::vector<AtenUpdate>& updates, const GroupOptions& group, double grad_scale) {
  std::vector<AtenUpdate> batch;
  std::int64_t numel = 0;
  const auto flush = [&] {
    if (!batch.empty()) update_batch(kind, batch, group, grad_scale);
    batch.clear();
    numel = 0;
  };
  for (const auto& update : updates) {
    const std::int64_t size = update.item->grad.numel();
    // torch's fused SGD takes one `is_first_step` for its whole list.
    if (!batch.empty() && (numel + size > kAtenBatchNumel || batch.front().first_step != update.first_step)) flush();
    batch.push_back(update);
    numel += size;
  }
  flush();
}

}  // namespace unshard
