#pragma once
// What each instruction set supplies for rows.cc: single rows, on one thread. Plain types only (see the note in core/vec.h).
#include <cstdint>

namespace unshard::inference {

struct RowKernels {
  void (*rms_norm)(const float* x, const float* weight, float offset, float eps, float* out, std::int64_t width);
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, float* out, std::int64_t width);
  /// One head: pairs (i, i + half).
  void (*rope)(float* x, const float* cos, const float* sin, std::int64_t half);
  void (*gelu)(float* x, std::int64_t n, bool tanh);
};

const RowKernels& row_kernels_portable();
const RowKernels& row_kernels_avx2();
const RowKernels& row_kernels_avx512();

}  // namespace unshard::inference
