#include "inference_torch/torch_cache.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <cstring>
#include <set>

#include "inference/kernels/attention.h"

namespace unshard::inference {
namespace {

template <class T>
at::Tensor numbers(const std::vector<T>& values, at::ScalarType dtype, const at::Device& device) {
  auto host = at::empty({static_cast<std::int64_t>(values.size())}, dtype);
  if (!values.empty()) std::memcpy(host.data_ptr(), values.data(), host.nbytes());
  return host.to(device);
}

}  // namespace

at::Tensor indices(const std::vector<std::int64_t>& values, const at::Device& device) { return numbers(values, at::kLong, device); }
at::Tensor words(const std::vector<std::int32_t>& values, const at::Device& device) { return numbers(values, at::kInt, device); }

std::int64_t torch_block_bytes(const ModelConfig& config, at::ScalarType dtype) {
  return config.layers * 2 * kBlockTokens * config.kv_heads * config.head_size * static_cast<std::int64_t>(at::elementSize(dtype));
}

TorchCache::TorchCache(std::int64_t layers, std::int64_t blocks, std::int64_t kv_heads, std::int64_t head_size, at::ScalarType dtype,
                       const at::Device& device)
    : memory_(at::zeros({layers, 2, blocks, kBlockTokens, kv_heads, head_size}, at::TensorOptions(device).dtype(dtype))) {
  for (std::int64_t i = 0; i < layers; ++i) {
    keys_.push_back(memory_.select(0, i).select(0, 0));
    values_.push_back(memory_.select(0, i).select(0, 1));
  }
}

void TorchCache::copy(std::span<const std::pair<std::int32_t, std::int32_t>> copies) {
  const c10::InferenceMode guard;
  std::vector<std::int64_t> from, to;
  std::set<std::int32_t> written;
  const auto flush = [&] {
    if (from.empty()) return;
    memory_.index_copy_(2, indices(to, memory_.device()), at::index_select(memory_, 2, indices(from, memory_.device())));
    from.clear(), to.clear(), written.clear();
  };
  for (const auto& [source, target] : copies) {
    if (written.contains(source) || written.contains(target)) flush();  // together they'd lose their order
    from.push_back(source), to.push_back(target), written.insert(target);
  }
  flush();
}

}  // namespace unshard::inference
