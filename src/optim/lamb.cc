#include "optim/lamb.h"

#include <ATen/ops/linalg_vector_norm.h>

#include <algorithm>
#include <cmath>

#include "optim/aten_update.h"

namespace unshard {
namespace {

/// A stretch of one piece.
struct Part {
  at::Tensor weights, grad, exp_avg, exp_avg_sq;
};

template <class F>
void for_parts(const LambUpdate& update, const at::Tensor& weights, F&& visit) {
  const auto numel = weights.numel(), chunk = weights.is_cpu() ? kLambChunk : numel;
  for (std::int64_t begin = 0; begin < numel; begin += chunk) {
    const auto part = [&, count = std::min(chunk, numel - begin)](const at::Tensor& whole) { return whole.narrow(0, begin, count); };
    visit(Part{part(weights), part(update.item->grad), part(update.exp_avg), part(update.exp_avg_sq)});
  }
}

/// Without bias correction of the averages: the step size carries it.
at::Tensor direction_of(const Part& part, const GroupOptions& group) {
  const at::Tensor root = group.eps_inside_sqrt ? part.exp_avg_sq.add(group.eps).sqrt_() : part.exp_avg_sq.sqrt().add_(group.eps);
  at::Tensor direction = part.exp_avg.div(root);
  if (group.weight_decay != 0) direction.add_(part.weights, group.weight_decay);
  return direction;
}

double squares_of(const at::Tensor& values) {
  const double norm = at::linalg_vector_norm(values, 2, std::nullopt, false, at::kDouble).item<double>();
  return norm * norm;
}

/// Move the averages. \return  squares of the weights and of the direction
std::pair<double, double> move_averages(const LambUpdate& update, const GroupOptions& group, double grad_scale) {
  double weights = 0, direction = 0;
  for_parts(update, refreshed_weights(*update.item), [&](const Part& part) {
    const at::Tensor grad = part.grad.to(at::kFloat).mul(grad_scale);
    part.exp_avg.mul_(group.beta1).add_(grad, 1 - group.beta1);
    part.exp_avg_sq.mul_(group.beta2).addcmul_(grad, grad, 1 - group.beta2);
    weights += squares_of(part.weights);
    direction += squares_of(direction_of(part, group));
  });
  return {weights, direction};
}

double step_size(const GroupOptions& group, std::int64_t step) {
  if (!group.bias_correction) return group.lr;
  const auto steps = static_cast<double>(step);
  return group.lr * std::sqrt(1 - std::pow(group.beta2, steps)) / (1 - std::pow(group.beta1, steps));
}

double coefficient(double weights, double direction, const GroupOptions& group) {
  if (weights == 0 || direction == 0) return 1;
  return std::min(std::max(std::sqrt(weights / direction), group.min_coeff), group.max_coeff);
}

}  // namespace

std::vector<double> update_with_lamb(const std::vector<LambUpdate>& updates, const std::vector<GroupOptions>& groups,
                                     const UpdateScale& scale) {
  std::vector<double> squares;
  for (const auto& update : updates) {
    const GroupOptions& group = groups[static_cast<std::size_t>(update.item->group)];
    const auto [weights, direction] = move_averages(update, group, group.maximize ? -scale.scale : scale.scale);
    squares.insert(squares.end(), {weights, direction});
  }
  if (scale.sum_over_ranks) scale.sum_over_ranks(squares);
  std::vector<double> coefficients;
  for (std::size_t i = 0; i < updates.size(); ++i) {
    const auto& update = updates[i];
    const GroupOptions& group = groups[static_cast<std::size_t>(update.item->group)];
    coefficients.push_back(coefficient(squares[2 * i], squares[2 * i + 1], group));
    const double move = step_size(group, update.step) * coefficients.back();
    const at::Tensor weights = update.item->master.defined() ? update.item->master : update.item->param;
    for_parts(update, weights, [&](const Part& part) { part.weights.sub_(direction_of(part, group), move); });
    if (update.item->master.defined()) update.item->param.copy_(update.item->master);
  }
  return coefficients;
}

}  // namespace unshard
