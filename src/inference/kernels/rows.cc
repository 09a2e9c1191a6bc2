#include "inference/kernels/rows.h"

#include <algorithm>

#include "core/cpu_isa.h"
#include "inference/kernels/rows_kernels.h"

namespace unshard::inference {
namespace {

/// Elements that are worth waking another worker for.
constexpr std::int64_t kGrain = 8192;

const RowKernels& table() { return kernels::select_table(row_kernels_portable, row_kernels_avx2, row_kernels_avx512); }

/// f(row) for each of `rows` rows of `width` elements.
template <class F>
void each_row(std::int64_t rows, std::int64_t width, Workers& workers, F f) {
  workers.parallel_for(rows, std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(width, 1)),
                       [&](std::int64_t begin, std::int64_t end) {
                         for (std::int64_t row = begin; row < end; ++row) f(row);
                       });
}

}  // namespace

void rms_norm(const float* x, std::int64_t x_stride, const float* weight, float offset, float eps, float* out, std::int64_t out_stride,
              std::int64_t tokens, std::int64_t width, Workers& workers) {
  const RowKernels& kernels = table();
  each_row(tokens, width, workers,
           [&](std::int64_t t) { kernels.rms_norm(x + t * x_stride, weight, offset, eps, out + t * out_stride, width); });
}

void layer_norm(const float* x, std::int64_t x_stride, const float* weight, const float* bias, float eps, float* out,
                std::int64_t out_stride, std::int64_t tokens, std::int64_t width, Workers& workers) {
  const RowKernels& kernels = table();
  each_row(tokens, width, workers,
           [&](std::int64_t t) { kernels.layer_norm(x + t * x_stride, weight, bias, eps, out + t * out_stride, width); });
}

void rope(float* x, std::int64_t stride, std::int64_t heads, std::int64_t head_size, std::int64_t rotary, const std::int32_t* positions,
          const float* cos, const float* sin, std::int64_t tokens, Workers& workers) {
  const RowKernels& kernels = table();
  const std::int64_t half = rotary / 2;
  each_row(tokens, heads * rotary, workers, [&](std::int64_t t) {
    const std::int64_t angles = positions[t] * half;
    for (std::int64_t head = 0; head < heads; ++head) kernels.rope(x + t * stride + head * head_size, cos + angles, sin + angles, half);
  });
}

void gelu(float* x, std::int64_t n, bool tanh, Workers& workers) {
  const RowKernels& kernels = table();
  workers.parallel_for(n, kGrain, [&](std::int64_t begin, std::int64_t end) { kernels.gelu(x + begin, end - begin, tanh); });
}

}  // namespace unshard::inference
