// A mixture of experts: rows sorted by expert, each expert's computed together. Source: Mixtral (arXiv 2401.04088), Qwen2-MoE.
#include <ATen/TensorOperators.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros_like.h>

#include "inference_torch/torch_model.h"

namespace unshard::inference {

/// normed: [T, D] fp32. Waits for the device once, for how many rows each expert has.
at::Tensor TorchModel::mixture(const TorchExperts& weights, const at::Tensor& normed) const {
  const auto& sizes = config_.experts;
  const auto shares = at::softmax(at::linear(normed, weights.router.weight), -1);
  auto [weight, expert] = shares.topk(sizes.chosen, -1);  // [T, chosen]
  if (sizes.normalise) weight = weight / weight.sum(-1, /*keepdim=*/true);
  const auto [experts, order] = expert.flatten().sort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
  const auto rows = order.floor_divide(sizes.chosen);
  const auto counts = at::bincount(experts, {}, sizes.experts).to(at::kCPU);
  const auto input = normed.to(dtype_), visitors = at::index_select(input, 0, rows);
  std::vector<at::Tensor> results;
  std::int64_t first = 0;
  for (std::int64_t e = 0; e < sizes.experts; ++e) {
    const auto count = counts.const_data_ptr<std::int64_t>()[e];
    if (count > 0) results.push_back(mlp(weights.experts[static_cast<std::size_t>(e)], visitors.narrow(0, first, count)));
    first += count;
  }
  auto out = at::zeros_like(normed);
  out.index_add_(0, rows, at::cat(results).to(at::kFloat) * at::index_select(weight.flatten(), 0, order).unsqueeze(1));
  if (sizes.shared_intermediate > 0)
    out.add_(mlp(weights.shared, input).to(at::kFloat) * at::sigmoid(at::linear(normed, weights.shared_switch.weight)));
  return out;
}

}  // namespace unshard::inference
