#pragma once
// Small operations on rows of floats, each in one pass, over all rows of a step. In place where out == x.
#include <cstdint>

#include "inference/kernels/workers.h"

namespace unshard::inference {

/// out = x / rms(x) * (weight + offset); offset is 1 for Gemma. [T, width]
void rms_norm(const float* x, std::int64_t x_stride, const float* weight, float offset, float eps, float* out, std::int64_t out_stride,
              std::int64_t tokens, std::int64_t width, Workers& workers);
void layer_norm(const float* x, std::int64_t x_stride, const float* weight, const float* bias, float eps, float* out,
                std::int64_t out_stride, std::int64_t tokens, std::int64_t width, Workers& workers);

/// Rotate the first `rotary` features of each head by its position: half-split pairs (i, i + rotary / 2), as Hugging Face has them.
/// cos, sin: [positions, rotary / 2]. x: [T, heads * head_size], rows `stride` apart.
void rope(float* x, std::int64_t stride, std::int64_t heads, std::int64_t head_size, std::int64_t rotary, const std::int32_t* positions,
          const float* cos, const float* sin, std::int64_t tokens, Workers& workers);
/// y = gelu(x), in place (tanh: the approximation).
void gelu(float* x, std::int64_t n, bool tanh, Workers& workers);

}  // namespace unshard::inference
