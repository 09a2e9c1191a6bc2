#pragma once
// Rows of a file into groups of 32 for q8 and q4: taken over where the file has them already, rounded otherwise.
#include <cstdint>
#include <vector>

#include "inference/kernels/matrix_kernels.h"
#include "inference/weights/weight_view.h"

namespace unshard::inference {

/// Row `r` in groups. q4 takes over Q4_0, Q4_1, Q4_K and q8 takes over Q8_0, Q5_0, Q4_0 as they are, but for scales of Q4_K, which become
/// fp16; all others are expanded and rounded. \param scratch  reused between calls
void quantize_row_q8(const MatrixKernels& kernels, const WeightView& view, std::int64_t r, std::vector<float>& scratch, StoredGroup* out);
void quantize_row_q4(const MatrixKernels& kernels, const WeightView& view, std::int64_t r, std::vector<float>& scratch, StoredGroup* out);

}  // namespace unshard::inference
