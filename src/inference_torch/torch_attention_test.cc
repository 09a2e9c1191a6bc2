// Attention over gathered blocks against our own kernel; CPU tensors stand for a GPU's.
#include "inference_torch/torch_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/nan_to_num.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "inference/cuda/paged_attention_testing.h"
#include "inference_torch/torch_cache.h"

namespace unshard::inference {
namespace {

at::Tensor tensor_of(const void* data, at::IntArrayRef sizes, at::ScalarType type) {
  auto tensor = at::empty(sizes, type);
  std::memcpy(tensor.data_ptr(), data, tensor.nbytes());
  return tensor;
}

std::vector<float> compute(const testing::AttentionCase& given) {
  ModelConfig config;
  config.heads = given.kv_heads * given.group;
  config.kv_heads = given.kv_heads;
  config.head_size = given.head_size;
  config.attention_scale = given.options.scale;
  config.attention_softcap = given.options.softcap;
  Batch batch;
  batch.spans = given.spans;
  const auto type = given.type == CudaKvType::f32 ? at::kFloat : given.type == CudaKvType::f16 ? at::kHalf : at::kBFloat16;
  const auto cache = [&](const std::vector<std::byte>& bytes) {
    const auto token = given.kv_heads * given.head_size * static_cast<std::int64_t>(at::elementSize(type));
    const auto blocks = static_cast<std::int64_t>(bytes.size()) / token / kBlockTokens;
    return at::nan_to_num(tensor_of(bytes.data(), {blocks, kBlockTokens, given.kv_heads, given.head_size}, type), 0.0);
  };
  TorchAttention attention(config, batch, at::kFloat, at::kCPU);
  const auto q = tensor_of(given.q.data(), {given.rows, config.heads, config.head_size}, at::kFloat);
  const auto out = attention.attend(q, cache(given.keys), cache(given.values), given.options.window).contiguous();
  return {out.const_data_ptr<float>(), out.const_data_ptr<float>() + out.numel()};
}

TEST(TorchAttention, IsWhatTheCpuKernelComputes) {
  std::mt19937 random(1);
  for (int round = 0; round < 60; ++round) {
    const auto made = testing::random_case(round, 400, random);
    ASSERT_LE(made.error(compute(made)), 3e-5) << "round " << round << ": " << made.name();
  }
}

TEST(TorchAttention, StoresRowsWhereTheBlockTableSays) {
  ModelConfig config;
  config.heads = config.kv_heads = 1;
  config.head_size = 4;
  TorchCache cache(1, 5, 1, 4, at::kFloat, at::kCPU);
  const std::vector<std::int32_t> first = {3, 1}, second = {4};
  Batch batch;
  batch.add(std::vector<Token>{7, 8, 9}, 14, first.data());
  batch.add(std::vector<Token>{5}, 0, second.data());
  const auto k = at::arange(16, at::kFloat).view({4, 1, 4});
  TorchAttention(config, batch, at::kFloat, at::kCPU).store(cache.keys(0), cache.values(0), k, k + 100);
  const auto keys = cache.keys(0).view({-1, 4}), values = cache.values(0).view({-1, 4});
  const std::vector<std::int64_t> slots = {3 * 16 + 14, 3 * 16 + 15, 1 * 16, 4 * 16};
  for (std::int64_t row = 0; row < 4; ++row) {
    EXPECT_TRUE(at::equal(keys[slots[static_cast<std::size_t>(row)]], k[row][0])) << row;
    EXPECT_TRUE(at::equal(values[slots[static_cast<std::size_t>(row)]], k[row][0] + 100)) << row;
  }
  EXPECT_EQ(keys.sum().item<float>(), k.sum().item<float>());  // nothing else was written
}

TEST(TorchCache, CopiesBlocksInOrder) {
  std::mt19937 random(2);
  TorchCache cache(2, 6, 1, 4, at::kFloat, at::kCPU);
  for (std::int64_t layer = 0; layer < 2; ++layer) {
    cache.keys(layer).normal_();
    cache.values(layer).normal_();
  }
  for (int round = 0; round < 20; ++round) {
    const auto keys = cache.keys(1).clone(), values = cache.values(0).clone();
    std::vector<std::pair<std::int32_t, std::int32_t>> copies;
    for (int i = 0; i < 4; ++i) copies.emplace_back(random() % 6, random() % 6);
    cache.copy(copies);
    for (const auto& [from, to] : copies) {
      keys[to].copy_(keys[from].clone());
      values[to].copy_(values[from].clone());
    }
    ASSERT_TRUE(at::equal(cache.keys(1), keys) && at::equal(cache.values(0), values)) << round;
  }
}

}  // namespace
}  // namespace unshard::inference
