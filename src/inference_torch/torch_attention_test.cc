// Attention over gathered blocks, and the CUDA kernel's source called as the engine calls it, against our own kernel; CPU tensors stand for
// a GPU's.
#include "inference_torch/torch_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/nan_to_num.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "inference/cuda/emulated_device.h"
#include "inference/cuda/paged_attention_testing.h"
#include "inference_torch/torch_cache.h"

namespace unshard::inference {
namespace emulated {
namespace {
#define UNSHARD_UNROLL
#include "inference/cuda/paged_attention_kernels.inc"
}  // namespace
}  // namespace emulated

namespace {

at::Tensor tensor_of(const void* data, at::IntArrayRef sizes, at::ScalarType type) {
  auto tensor = at::empty(sizes, type);
  std::memcpy(tensor.data_ptr(), data, tensor.nbytes());
  return tensor;
}

struct Inputs {
  ModelConfig config;
  at::Tensor q, keys, values;
};
/// q as the engine has it: part of a tensor that holds keys and values too. Caches as they begin: zeros where nothing was stored.
Inputs inputs_of(const testing::AttentionCase& given) {
  Inputs made;
  auto& config = made.config;
  config.heads = given.kv_heads * given.group;
  config.kv_heads = given.kv_heads;
  config.head_size = given.head_size;
  config.attention_scale = given.options.scale;
  config.attention_softcap = given.options.softcap;
  made.q = at::empty({given.rows, config.heads + 2 * config.kv_heads, config.head_size}, at::kFloat).narrow(1, 0, config.heads);
  made.q.copy_(tensor_of(given.q.data(), made.q.sizes(), at::kFloat));
  const auto type = given.type == CudaKvType::f32 ? at::kFloat : given.type == CudaKvType::f16 ? at::kHalf : at::kBFloat16;
  const auto token = given.kv_heads * given.head_size * static_cast<std::int64_t>(at::elementSize(type));
  const auto blocks = static_cast<std::int64_t>(given.keys.size()) / token / kBlockTokens;
  for (auto [cache, bytes] : {std::pair{&made.keys, &given.keys}, {&made.values, &given.values}})
    *cache = at::nan_to_num(tensor_of(bytes->data(), {blocks, kBlockTokens, given.kv_heads, given.head_size}, type), 0.0);
  return made;
}
std::vector<float> floats_of(const at::Tensor& out) {
  const auto whole = out.contiguous();
  return {whole.const_data_ptr<float>(), whole.const_data_ptr<float>() + whole.numel()};
}

std::vector<float> compute(const testing::AttentionCase& given) {
  const auto inputs = inputs_of(given);
  Batch batch;
  batch.spans = given.spans;
  TorchAttention attention(inputs.config, batch, at::kFloat, at::kCPU);
  return floats_of(attention.attend(inputs.q, inputs.keys, inputs.values, given.options.window));
}

struct Launcher {
  std::mt19937& random;
  template <class... Arguments>
  void operator()(const emulated::Grid& grid, void (*kernel)(Arguments...), Arguments... arguments) const {
    emulated::launch({grid.x, grid.y, grid.z}, emulated::kThreads, random, [&] { kernel(arguments...); });
  }
};
std::vector<float> compute_by_kernel(const testing::AttentionCase& given, std::mt19937& random) {
  const auto inputs = inputs_of(given);
  const auto plan = plan_attention(given.spans, given.group, given.head_size);
  const auto out = at::empty({given.rows, given.width()}, at::kFloat);
  const auto count = paged_attention_floats(plan, given.kv_heads, given.head_size, given.options.window, given.processors);
  const auto plan_words = words(plan.words, at::kCPU), partials = at::empty({count}, at::kFloat);
  const auto call = kernel_call(inputs.config, inputs.q, out, inputs.keys, inputs.values, plan_words, partials, given.options.window);
  emulated::launch_all(call, plan, given.processors, Launcher{random});
  return floats_of(out);
}

TEST(TorchAttention, IsWhatTheCpuKernelComputes) {
  std::mt19937 random(1);
  for (int round = 0; round < 60; ++round) {
    const auto made = testing::random_case(round, 400, random);
    ASSERT_LE(made.error(compute(made)), 3e-5) << "round " << round << ": " << made.name();
  }
}

TEST(TorchAttention, CallsTheKernelWithWhatItsTensorsAre) {
  std::mt19937 random(3);
  for (int round = 0; round < 9; ++round) {
    const auto made = testing::random_case(round, 100, random);
    ASSERT_LE(made.error(compute_by_kernel(made, random)), 2e-5) << "round " << round << ": " << made.name();
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
