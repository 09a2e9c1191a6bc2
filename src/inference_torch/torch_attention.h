#pragma once
// Attention over the paged cache on LibTorch's devices: by our CUDA kernel where it is built and the device has it, else by
// scaled_dot_product_attention over the blocks of each sequence, brought together.
#include <ATen/core/Tensor.h>

#include <map>
#include <vector>

#include "inference/cuda/paged_attention.h"
#include "inference/model/decoder.h"
#include "inference/model/model_config.h"

namespace unshard::inference {

/// Of one step; used by all its layers.
class TorchAttention {
 public:
  TorchAttention(const ModelConfig& config, const Batch& batch, at::ScalarType dtype, const at::Device& device);

  /// Keep these rows' keys and values, [T, kv_heads, head_size] each.
  void store(const at::Tensor& keys, const at::Tensor& values, const at::Tensor& k, const at::Tensor& v) const;
  /// [T, heads * head_size] of dtype. q: [T, heads, head_size] fp32; rows of this step must have been stored.
  at::Tensor attend(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values, std::int64_t window);

 private:
  /// Sequences with equally many rows in this step, computed together.
  struct Group {
    std::int64_t sequences = 0, rows = 0, keys = 0;  ///< keys: of the longest, in whole blocks
    bool whole = false;                              ///< one sequence from its first token on
    at::Tensor row_index;                            ///< [sequences * rows] of q
    at::Tensor blocks;                               ///< [sequences * keys / kBlockTokens]
    at::Tensor positions;                            ///< [sequences, rows]
    std::map<std::int64_t, at::Tensor> masks;        ///< by window: [sequences, 1, rows * heads a KV head, keys]
  };
  void make_groups(const Batch& batch);
  void add_group(std::span<const AttentionSpan> spans);
  const at::Tensor& mask(Group& group, std::int64_t window) const;
  at::Tensor attend_group(Group& group, const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values, std::int64_t window) const;
  at::Tensor attend_by_kernel(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values, std::int64_t window) const;

  const ModelConfig& config_;
  const at::ScalarType dtype_;
  const at::Device device_;
  const std::int64_t shared_;  ///< query heads that share a KV head
  at::Tensor slots_;           ///< [T]: block * kBlockTokens + place in it
  std::vector<Group> groups_;
  bool by_kernel_ = false;
  AttentionPlan plan_;
  at::Tensor plan_words_;
  std::int64_t processors_ = 0;
};

/// The kernel's arguments, of tensors on one device. q: [T, heads, head_size], out: [T, heads * head_size] fp32, rows anywhere apart.
PagedAttention kernel_call(const ModelConfig& config, const at::Tensor& q, const at::Tensor& out, const at::Tensor& keys,
                           const at::Tensor& values, const at::Tensor& plan_words, const at::Tensor& partials, std::int64_t window);

}  // namespace unshard::inference
