#include "inference/cuda/paged_attention.h"

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace unshard::inference {
namespace {

__device__ inline float float_of_half_bits(std::uint16_t bits) { return __half2float(__ushort_as_half(bits)); }

#define UNSHARD_UNROLL _Pragma("unroll")
#include "inference/cuda/paged_attention_kernels.inc"

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("[inference.paged_attention] ") + what + ": CUDA says '" + cudaGetErrorString(error) + "'");
}

struct Launcher {
  cudaStream_t stream;
  template <class... Arguments>
  void operator()(const Grid& grid, void (*kernel)(Arguments...), Arguments... arguments) const {
    kernel<<<dim3(grid.x, grid.y, grid.z), kThreads, 0, stream>>>(arguments...);
    check(cudaGetLastError(), "launch");
  }
};

}  // namespace

std::int64_t processors_of(int device) {
  int processors = 0;
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "a GPU's processors");
  return processors;
}

void paged_attention(const PagedAttention& call, const AttentionPlan& plan, std::int64_t processors, CUstream_st* stream) {
  if (!can_attend(call.head_size))
    throw std::invalid_argument("[inference.paged_attention] heads of " + std::to_string(call.head_size) +
                                " features aren't built; multiples of 4 up to 256 are");
  if (!call.options.causal) throw std::invalid_argument("[inference.paged_attention] attention to both sides isn't built");
  // This library has a CUDA runtime of its own beside torch's, which may have another idea of the current device.
  check(cudaSetDevice(call.device), "choosing the device");
  launch_all(call, plan, processors, Launcher{stream});
}

}  // namespace unshard::inference
