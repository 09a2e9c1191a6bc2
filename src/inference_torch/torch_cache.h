#pragma once
// The paged KV cache as one tensor on a device.
#include <ATen/core/Tensor.h>

#include "inference/model/step_model.h"

namespace unshard::inference {

class TorchCache : public StepCache {
 public:
  /// Zeros, so that what was never stored is finite: shares of 0 are multiplied with it. \throws c10::Error too little memory
  TorchCache(std::int64_t layers, std::int64_t blocks, std::int64_t kv_heads, std::int64_t head_size, at::ScalarType dtype,
             const at::Device& device);

  /// [blocks, kBlockTokens, kv_heads, head_size] of a layer.
  const at::Tensor& keys(std::int64_t layer) const { return keys_[static_cast<std::size_t>(layer)]; }
  const at::Tensor& values(std::int64_t layer) const { return values_[static_cast<std::size_t>(layer)]; }
  std::int64_t blocks() const override { return memory_.size(2); }
  std::int64_t bytes() const override { return static_cast<std::int64_t>(memory_.nbytes()); }
  void copy(std::span<const std::pair<std::int32_t, std::int32_t>> copies) override;

 private:
  at::Tensor memory_;  ///< [layers, 2, blocks, kBlockTokens, kv_heads, head_size]
  std::vector<at::Tensor> keys_, values_;
};

/// Bytes of one block in all layers.
std::int64_t torch_block_bytes(const ModelConfig& config, at::ScalarType dtype);

/// `values` as a tensor of 64-bit (32-bit) numbers on the device.
at::Tensor indices(const std::vector<std::int64_t>& values, const at::Device& device);
at::Tensor words(const std::vector<std::int32_t>& values, const at::Device& device);

}  // namespace unshard::inference
