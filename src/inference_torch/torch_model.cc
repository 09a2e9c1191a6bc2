// Shapes: T rows of this step, D hidden, H query heads, K key-value heads, S head size. The residual stream x, norms, rope and scores are
// fp32; products are of the weights' dtype.
#include "inference_torch/torch_model.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tanh.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include <cmath>
#include <cstring>
#include <optional>

#include "inference_torch/torch_cache.h"
#include "unshard/core/error.h"

namespace unshard::inference {
namespace {

at::Tensor linear(const TorchLinear& weights, const at::Tensor& x) {
  return at::linear(x, weights.weight, weights.bias.defined() ? std::optional(weights.bias) : std::nullopt);
}

const char* dtype_name(at::ScalarType dtype) { return dtype == at::kFloat ? "fp32" : dtype == at::kHalf ? "fp16" : "bf16"; }

at::Tensor activated(const at::Tensor& x, Gate gate) {
  return gate == Gate::silu ? at::silu(x) : at::gelu(x, gate == Gate::gelu_tanh ? "tanh" : "none");
}

/// The first features of each head turned in place, half-split pairs. x: [T, heads, S] fp32
void rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const auto half = cos.size(-1);
  const auto a = x.narrow(-1, 0, half), b = x.narrow(-1, half, half);
  const auto turned_a = a * cos - b * sin, turned_b = b * cos + a * sin;
  a.copy_(turned_a);
  b.copy_(turned_b);
}

}  // namespace

TorchModel::TorchModel(const WeightSource& source, ModelConfig config, at::ScalarType dtype, at::ScalarType kv_dtype, std::int64_t context,
                       const at::Device& device)
    : config_(std::move(config)), dtype_(dtype), kv_dtype_(kv_dtype), device_(device) {
  const c10::InferenceMode guard;
  const c10::OptionalDeviceGuard on(device_);
  if (config_.attention_scale == 0) config_.attention_scale = 1 / std::sqrt(static_cast<float>(config_.head_size));
  weights_ = load_torch_weights(source, config_, dtype_, device_);
  for (auto [rope, from] : {std::pair{&rope_, &config_.rope}, {&local_rope_, &config_.local_rope}}) {
    rope->config = *from;
    if (from->kind == RopeKind::none || from->rotary == 0) continue;
    std::vector<float> cos, sin;
    rope_tables(*from, context, context, cos, sin);
    for (auto [table, values] : {std::pair{&rope->cos, &cos}, {&rope->sin, &sin}}) {
      const auto host = at::empty({context, from->rotary / 2}, at::kFloat);
      std::memcpy(host.data_ptr(), values->data(), host.nbytes());
      *table = host.to(device_);
    }
  }
}

ModelFacts TorchModel::facts() const {
  return {.dtype = dtype_name(dtype_),
          .kv_dtype = dtype_name(kv_dtype_),
          .parameters = weights_.parameters,
          .weight_bytes = weights_.bytes,
          .block_bytes = torch_block_bytes(config_, kv_dtype_),
          .unread = weights_.unread};
}

std::unique_ptr<StepCache> TorchModel::new_cache(std::int64_t blocks) const {
  const c10::InferenceMode guard;
  try {
    return std::make_unique<TorchCache>(config_.layers, blocks, config_.kv_heads, config_.head_size, kv_dtype_, device_);
  } catch (const c10::Error& error) {
    throw ModelError(cat("[inference.kv_cache] ", blocks, " KV blocks of ", torch_block_bytes(config_, kv_dtype_),
                         " bytes can't be had on ", device_.str(), ": ", error.what_without_backtrace(),
                         "; ask for a smaller kv_cache_tokens"));
  }
}

TorchModel::Rotation TorchModel::Rope::at(const at::Tensor& positions) const {
  if (!cos.defined()) return {};
  return {at::index_select(cos, 0, positions).unsqueeze(1), at::index_select(sin, 0, positions).unsqueeze(1)};
}

at::Tensor TorchModel::embed(const at::Tensor& tokens, const at::Tensor& positions) const {
  auto x = at::index_select(weights_.embedding, 0, tokens).to(at::kFloat);
  if (config_.embedding_scale != 1) x.mul_(config_.embedding_scale);
  if (config_.learned_positions) x.add_(at::index_select(weights_.positions, 0, positions));
  return x;
}

at::Tensor TorchModel::normalise(const TorchNorm& norm, const at::Tensor& x) const {
  const auto width = x.size(-1);
  if (config_.norm == NormKind::rms) return at::rms_norm(x, {width}, norm.weight, config_.norm_eps);
  return at::layer_norm(x, {width}, norm.weight, norm.bias.defined() ? std::optional(norm.bias) : std::nullopt, config_.norm_eps);
}

at::Tensor TorchModel::attend(const TorchLayer& layer, const at::Tensor& normed, const Rotation& rotation, const at::Tensor& keys,
                              const at::Tensor& values, TorchAttention& attention) const {
  const auto heads = config_.heads, kv_heads = config_.kv_heads, size = config_.head_size;
  const auto qkv = linear(layer.qkv, normed).view({-1, heads + 2 * kv_heads, size});
  auto turned = qkv.narrow(1, 0, heads + kv_heads).to(at::kFloat);  // queries and keys side by side
  const auto norm_heads = [&](const TorchNorm& norm, std::int64_t first, std::int64_t count) {
    if (!norm.there()) return;
    const auto part = turned.narrow(1, first, count);
    part.copy_(at::rms_norm(part, {size}, norm.weight, config_.norm_eps));
  };
  norm_heads(layer.q_norm, 0, heads);
  norm_heads(layer.k_norm, heads, kv_heads);
  if (rotation.cos.defined()) rotate(turned, rotation.cos, rotation.sin);
  attention.store(keys, values, turned.narrow(1, heads, kv_heads), qkv.narrow(1, heads + kv_heads, kv_heads));
  return linear(layer.attention_output, attention.attend(turned.narrow(1, 0, heads), keys, values, layer.window));
}

at::Tensor TorchModel::mlp(const TorchMlp& weights, const at::Tensor& x) const {
  const auto in = linear(weights.in, x);
  if (!config_.gated) return linear(weights.down, activated(in, config_.activation));
  const auto inner = in.size(-1) / 2;
  return linear(weights.down, activated(in.narrow(-1, 0, inner), config_.activation) * in.narrow(-1, inner, inner));
}

void TorchModel::compute(const Batch& batch, StepCache& given, std::vector<float>& logits) const {
  const c10::InferenceMode guard;
  const c10::OptionalDeviceGuard on(device_);
  auto& cache = static_cast<TorchCache&>(given);
  const auto tokens = indices({batch.tokens.begin(), batch.tokens.end()}, device_);
  const auto positions = indices({batch.positions.begin(), batch.positions.end()}, device_);
  TorchAttention attention(config_, batch, dtype_, device_);
  const auto rotation = rope_.at(positions), local = local_rope_.at(positions);
  const auto x = embed(tokens, positions);
  const auto add = [&](const TorchNorm& post_norm, const at::Tensor& branch) {
    x.add_(post_norm.there() ? normalise(post_norm, branch.to(at::kFloat)) : branch);
  };
  for (std::int64_t i = 0; i < config_.layers; ++i) {
    const auto& layer = weights_.layers[static_cast<std::size_t>(i)];
    auto normed = normalise(layer.attention_norm, x);
    add(layer.post_attention_norm,
        attend(layer, normed.to(dtype_), layer.local_rope ? local : rotation, cache.keys(i), cache.values(i), attention));
    if (layer.mlp_norm.there()) normed = normalise(layer.mlp_norm, x);  // else Phi's: the MLP reads what attention read
    add(layer.post_mlp_norm, layer.dense ? mlp(layer.mlp, normed.to(dtype_)) : mixture(layer.experts, normed));
  }
  logits.clear();
  if (!batch.logit_rows.empty()) project(x, batch, logits);
}

void TorchModel::project(const at::Tensor& x, const Batch& batch, std::vector<float>& logits) const {
  const auto rows = at::index_select(x, 0, indices(batch.logit_rows, device_));
  auto out = linear(weights_.output, normalise(weights_.final_norm, rows).to(dtype_)).to(at::kFloat);
  if (config_.logit_softcap > 0) out = at::tanh(out / config_.logit_softcap) * config_.logit_softcap;
  out = out.to(at::kCPU).contiguous();
  const auto* values = out.const_data_ptr<float>();
  logits.assign(values, values + out.numel());
}

void TorchModel::forward(const Batch& batch, StepCache& cache, std::vector<float>& logits) {
  try {
    compute(batch, cache, logits);
  } catch (const c10::Error& error) {
    throw std::runtime_error(cat("[inference.torch] a step of ", batch.tokens.size(), " tokens on ", device_.str(),
                                 " failed: ", error.what_without_backtrace()));
  }
}

}  // namespace unshard::inference
