// The CUDA kernel on a GPU, against the portable CPU kernel. Without one: skipped, with CUDA's reason.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "inference/cuda/paged_attention.h"
#include "inference/cuda/paged_attention_testing.h"

namespace unshard::inference {
namespace {

using testing::AttentionCase;

/// A copy of host memory on the device.
class DeviceCopy {
 public:
  DeviceCopy(const void* host, std::size_t bytes) : bytes_(bytes) {
    EXPECT_EQ(cudaMalloc(&data_, bytes + 16), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data_, host, bytes, cudaMemcpyHostToDevice), cudaSuccess);
  }
  template <class T>
  explicit DeviceCopy(const std::vector<T>& values) : DeviceCopy(values.data(), values.size() * sizeof(T)) {}
  ~DeviceCopy() { cudaFree(data_); }
  DeviceCopy(const DeviceCopy&) = delete;
  DeviceCopy& operator=(const DeviceCopy&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  void read(void* host) const { EXPECT_EQ(cudaMemcpy(host, data_, bytes_, cudaMemcpyDeviceToHost), cudaSuccess); }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

class PagedAttentionOnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    const auto error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || devices == 0)
      GTEST_SKIP() << "skipped: no CUDA device (" << (error == cudaSuccess ? "none is there" : cudaGetErrorString(error)) << ")";
  }
};

std::vector<float> compute(const AttentionCase& given) {
  const auto plan = plan_attention(given.spans, given.group, given.head_size);
  const auto floats = paged_attention_floats(plan, given.kv_heads, given.head_size, given.options.window, given.processors);
  std::vector<float> out(given.q.size(), -7);
  const DeviceCopy q(given.q), result(out), keys(given.keys), values(given.values), words(plan.words),
      partials(std::vector<float>(static_cast<std::size_t>(floats), std::nanf("")));
  PagedAttention call;
  call.q = q.as<float>();
  call.out = result.as<float>();
  call.q_stride = call.out_stride = given.width();
  call.type = given.type;
  call.keys = keys.as<void>();
  call.values = values.as<void>();
  call.words = words.as<std::int32_t>();
  call.kv_heads = given.kv_heads;
  call.group = given.group;
  call.head_size = given.head_size;
  call.options = given.options;
  call.partials = partials.as<float>();
  paged_attention(call, plan, given.processors, nullptr);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  result.read(out.data());
  return out;
}

TEST_F(PagedAttentionOnGpu, IsWhatTheCpuKernelComputes) {
  std::mt19937 random(1);
  for (int round = 0; round < 120; ++round) {
    const auto made = testing::random_case(round, 3000, random);
    ASSERT_LE(made.error(compute(made)), 2e-5) << "round " << round << ": " << made.name();
  }
}

TEST_F(PagedAttentionOnGpu, GivesTheSameBitsEachTime) {
  std::mt19937 random(2);
  const auto made = testing::random_case(1, 3000, random);
  const auto once = compute(made);
  for (int round = 0; round < 20; ++round) ASSERT_EQ(compute(made), once);
}

}  // namespace
}  // namespace unshard::inference
