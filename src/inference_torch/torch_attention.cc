// Shapes: B sequences of a group, R rows each, L keys, K KV heads, G query heads that share one, S head size.
#include "inference_torch/torch_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tanh.h>

#include <algorithm>
#include <limits>

#include "inference_torch/torch_cache.h"
#ifdef UNSHARD_CUDA_KERNELS
#include <c10/core/impl/VirtualGuardImpl.h>
#endif

namespace unshard::inference {
namespace {

/// Tokens whose keys one group brings together: bounds what sequences of unequal lengths waste.
constexpr std::int64_t kGatheredTokens = 1 << 17;

std::int64_t blocks_of(const AttentionSpan& span) { return (span.position + span.rows + kBlockTokens - 1) / kBlockTokens; }

/// softmax(cap * tanh(scores / cap)) V: what scaled_dot_product_attention has no word for. All [B, K, R G, S]; fp32.
at::Tensor capped_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask, double scale,
                            double cap) {
  auto scores = at::matmul(q * scale, k.transpose(-2, -1));
  scores = at::tanh(scores / cap) * cap;
  scores.masked_fill_(mask.logical_not(), -std::numeric_limits<float>::infinity());
  return at::matmul(at::softmax(scores, -1), v);
}

}  // namespace

TorchAttention::TorchAttention(const ModelConfig& config, const Batch& batch, at::ScalarType dtype, const at::Device& device)
    : config_(config), dtype_(dtype), device_(device), shared_(config.heads / config.kv_heads) {
  std::vector<std::int64_t> slots;
  for (const auto& span : batch.spans)
    for (std::int64_t p = span.position; p < span.position + span.rows; ++p)
      slots.push_back(span.blocks[p / kBlockTokens] * kBlockTokens + p % kBlockTokens);
  slots_ = indices(slots, device_);
#ifdef UNSHARD_CUDA_KERNELS
  by_kernel_ = device_.is_cuda() && can_attend(config_.head_size);
  if (by_kernel_) {
    plan_ = plan_attention(batch.spans, shared_, config_.head_size);
    plan_words_ = words(plan_.words, device_);
    processors_ = processors_of(device_.index());
    return;
  }
#endif
  make_groups(batch);
}

/// Single rows (decoding) together, the longest first; a chunk of a prompt by itself.
void TorchAttention::make_groups(const Batch& batch) {
  std::vector<AttentionSpan> single;
  for (const auto& span : batch.spans) {
    if (span.rows == 1)
      single.push_back(span);
    else
      add_group({&span, 1});
  }
  std::stable_sort(single.begin(), single.end(), [](const auto& a, const auto& b) { return a.position > b.position; });
  for (std::size_t begin = 0; begin < single.size();) {
    const auto fit = static_cast<std::size_t>(std::max<std::int64_t>(1, kGatheredTokens / (blocks_of(single[begin]) * kBlockTokens)));
    const auto count = std::min(fit, single.size() - begin);
    add_group(std::span(single).subspan(begin, count));
    begin += count;
  }
}

void TorchAttention::add_group(std::span<const AttentionSpan> spans) {
  Group group;
  group.sequences = static_cast<std::int64_t>(spans.size());
  group.rows = spans.front().rows;
  std::int64_t blocks = 0;
  for (const auto& span : spans) blocks = std::max(blocks, blocks_of(span));
  group.keys = blocks * kBlockTokens;
  group.whole = spans.size() == 1 && spans.front().position == 0;
  std::vector<std::int64_t> rows, positions, tables;
  for (const auto& span : spans) {
    for (std::int64_t r = 0; r < span.rows; ++r) rows.push_back(span.first_row + r), positions.push_back(span.position + r);
    // Beyond its end a sequence's own first block stands in: nobody sees it, and no other's values are multiplied, not even by 0.
    for (std::int64_t b = 0; b < blocks; ++b) tables.push_back(span.blocks[b < blocks_of(span) ? b : 0]);
  }
  group.row_index = indices(rows, device_);
  group.positions = indices(positions, device_).view({group.sequences, group.rows});
  group.blocks = indices(tables, device_);
  groups_.push_back(std::move(group));
}

const at::Tensor& TorchAttention::mask(Group& group, std::int64_t window) const {
  auto& mask = group.masks[window];
  if (mask.defined()) return mask;
  const auto keys = at::arange(group.keys, group.positions.options());
  const auto positions = group.positions.unsqueeze(-1);
  auto seen = keys <= positions;  // [B, R, L]
  if (window > 0) seen = seen.logical_and(keys > positions - window);
  mask = seen.unsqueeze(2).expand({-1, -1, shared_, -1}).reshape({group.sequences, 1, group.rows * shared_, group.keys});
  return mask;
}

void TorchAttention::store(const at::Tensor& keys, const at::Tensor& values, const at::Tensor& k, const at::Tensor& v) const {
  for (const auto& [cache, rows] : {std::pair{&keys, &k}, {&values, &v}})
    cache->view({-1, config_.kv_heads, config_.head_size}).index_copy_(0, slots_, rows->to(cache->scalar_type()));
}

at::Tensor TorchAttention::attend_group(Group& group, const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                                        std::int64_t window) const {
  const auto kv_heads = config_.kv_heads, size = config_.head_size;
  const bool capped = config_.attention_softcap > 0;
  const auto dtype = capped ? at::kFloat : dtype_;
  const auto gathered = [&](const at::Tensor& cache) {  // [B, K, L, S]
    return at::index_select(cache, 0, group.blocks).view({group.sequences, group.keys, kv_heads, size}).transpose(1, 2).to(dtype);
  };
  const auto k = gathered(keys), v = gathered(values);
  const auto asked = at::index_select(q, 0, group.row_index).to(dtype);
  const double scale = config_.attention_scale;
  if (group.whole && window == 0 && !capped) {
    const auto rows = asked.view({1, group.rows, config_.heads, size}).transpose(1, 2);
    const auto out = at::scaled_dot_product_attention(rows, k.narrow(2, 0, group.rows), v.narrow(2, 0, group.rows), {}, 0.0,
                                                      /*is_causal=*/true, scale, /*enable_gqa=*/shared_ > 1);
    return out.transpose(1, 2).reshape({group.rows, -1});
  }
  // Heads that share keys stand as rows beside each other, so that the keys needn't be repeated for each.
  const auto rows = asked.view({group.sequences, group.rows, kv_heads, shared_, size})
                        .permute({0, 2, 1, 3, 4})
                        .reshape({group.sequences, kv_heads, group.rows * shared_, size});
  const auto& seen = mask(group, window);
  const auto out = capped ? capped_attention(rows, k, v, seen, scale, config_.attention_softcap)
                          : at::scaled_dot_product_attention(rows, k, v, seen, 0.0, false, scale);
  return out.view({group.sequences, kv_heads, group.rows, shared_, size})
      .permute({0, 2, 1, 3, 4})
      .reshape({group.sequences * group.rows, -1})
      .to(dtype_);
}

PagedAttention kernel_call(const ModelConfig& config, const at::Tensor& q, const at::Tensor& out, const at::Tensor& keys,
                           const at::Tensor& values, const at::Tensor& plan_words, const at::Tensor& partials, std::int64_t window) {
  const auto kept = keys.scalar_type();
  PagedAttention call;
  call.device = q.is_cuda() ? q.device().index() : 0;
  call.q = q.const_data_ptr<float>();
  call.q_stride = q.stride(0);
  call.out = out.mutable_data_ptr<float>();
  call.out_stride = out.stride(0);
  call.type = kept == at::kFloat ? CudaKvType::f32 : kept == at::kHalf ? CudaKvType::f16 : CudaKvType::bf16;
  call.keys = keys.const_data_ptr();
  call.values = values.const_data_ptr();
  call.words = plan_words.const_data_ptr<std::int32_t>();
  call.kv_heads = config.kv_heads;
  call.group = config.heads / config.kv_heads;
  call.head_size = config.head_size;
  call.options = {config.attention_scale, window, config.attention_softcap};
  call.partials = partials.mutable_data_ptr<float>();
  return call;
}

#ifdef UNSHARD_CUDA_KERNELS
at::Tensor TorchAttention::attend_by_kernel(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                                            std::int64_t window) const {
  const auto floats = at::TensorOptions(device_).dtype(at::kFloat);
  const auto out = at::empty({q.size(0), config_.heads * config_.head_size}, floats);
  // Freed before the kernel has run, but for the same stream: what is allocated next there is used after it.
  const auto partials = at::empty({paged_attention_floats(plan_, config_.kv_heads, config_.head_size, window, processors_)}, floats);
  const auto stream = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  paged_attention(kernel_call(config_, q, out, keys, values, plan_words_, partials, window), plan_, processors_,
                  static_cast<CUstream_st*>(stream.native_handle()));
  return out.to(dtype_);
}
#else
at::Tensor TorchAttention::attend_by_kernel(const at::Tensor&, const at::Tensor&, const at::Tensor&, std::int64_t) const { return {}; }
#endif

at::Tensor TorchAttention::attend(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values, std::int64_t window) {
  if (by_kernel_) return attend_by_kernel(q, keys, values, window);
  auto out = at::empty({q.size(0), config_.heads * config_.head_size}, at::TensorOptions(device_).dtype(dtype_));
  for (auto& group : groups_) out.index_copy_(0, group.row_index, attend_group(group, q, keys, values, window));
  return out;
}

}  // namespace unshard::inference
