// What products need beyond core/vec.h: multiply-add, rounding to int8, bytes times bytes into int32 lanes. Same rules as there.
#pragma once
#include "core/vec.h"

#if defined(UNSHARD_VEC_AVX512)
#include "inference/kernels/lanes_avx512.h"
#elif defined(UNSHARD_VEC_AVX2)
#include "inference/kernels/lanes_avx2.h"
#else
#include "inference/kernels/lanes_portable.h"
#endif

namespace unshard::UNSHARD_VEC_NS {

/// f(position, 16 values) over a row; the last values are filled up with zeros.
template <class F>
UNSHARD_INLINE void each_16(const float* x, std::int64_t cols, F f) {
  std::int64_t k = 0;
  for (; k + 16 <= cols; k += 16) f(k, load_f32(x + k));
  if (k < cols) f(k, load_part<F32>(x + k, static_cast<int>(cols - k)));
}

}  // namespace unshard::UNSHARD_VEC_NS
