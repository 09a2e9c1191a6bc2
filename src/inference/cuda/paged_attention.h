#pragma once
// Attention over a paged KV cache in a GPU's memory: prefill and decode rows alike. Needs no torch; built where CUDA's compiler is
// (cmake/Cuda.cmake). Its device code also runs in the tests, on the processor (emulated_device.h).
#include <cstdint>

#include "inference/cuda/attention_plan.h"

struct CUstream_st;

namespace unshard::inference {

enum class CudaKvType { f32, bf16, f16 };

/// Everything of one layer's call. Pointers are of the device, to memory that begins at multiples of 16 bytes.
struct PagedAttention {
  int device = 0;
  const float* q = nullptr;  ///< [rows, kv_heads * group * head_size], rows `q_stride` apart (a multiple of 4)
  std::int64_t q_stride = 0;
  float* out = nullptr;  ///< of q's shape
  std::int64_t out_stride = 0;
  CudaKvType type = CudaKvType::bf16;
  const void *keys = nullptr, *values = nullptr;  ///< [blocks, kBlockTokens, kv_heads, head_size]
  const std::int32_t* words = nullptr;            ///< the plan's
  std::int64_t kv_heads = 0, group = 1, head_size = 0;
  AttentionOptions options;
  float* partials = nullptr;  ///< paged_attention_floats() of them; may be shared by calls in one stream
};

/// \throws std::runtime_error naming CUDA's error
std::int64_t processors_of(int device);
/// out = softmax(q K^T) V, causal, in `stream`'s order, which is of call.device (the thread's current device afterwards); keys and values
/// of the plan's rows must be there. Scores, shares and sums are fp32. \throws std::invalid_argument  can_attend() is false, or the options
/// aren't causal; std::runtime_error  naming CUDA's error
void paged_attention(const PagedAttention& call, const AttentionPlan& plan, std::int64_t processors, CUstream_st* stream);

}  // namespace unshard::inference
