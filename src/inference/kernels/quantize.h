#pragma once
// Weights into groups of 32 for q8 and q4, and rows for w8a8: taken over from a file that has them already, or rounded here.
#include <cstdint>
#include <vector>

#include "inference/kernels/matrix_kernels.h"
#include "inference/weights/weight_view.h"

namespace unshard::inference {

/// 32 weights as a packed matrix holds them. q8: scale * (q - 128), shift is 0. q4: scale * q + shift, q below 16. Both fp16.
struct StoredGroup {
  std::uint16_t scale = 0, shift = 0;
  std::uint8_t q[kGroup] = {};
};

/// Row `r` in groups. q4 takes over Q4_0, Q4_1, Q4_K and q8 takes over Q8_0, Q5_0, Q4_0 as they are, but for scales of Q4_K, which become
/// fp16; all others are expanded and rounded. \param scratch  reused between calls
void quantize_row_q8(const WeightView& view, std::int64_t r, std::vector<float>& scratch, StoredGroup* out);
void quantize_row_q4(const WeightView& view, std::int64_t r, std::vector<float>& scratch, StoredGroup* out);
/// out[i] = 128 + round(x[i] / scale). \return scale: largest |x| / 127
float quantize_bytes(const float* x, std::int64_t n, std::uint8_t* out);

}  // namespace unshard::inference
