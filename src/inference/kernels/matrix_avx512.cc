#if defined(__x86_64__)
#define UNSHARD_VEC_AVX512
#endif
#include "inference/kernels/matrix_kernels.inc"

namespace unshard::inference {
const MatrixKernels& matrix_kernels_avx512() {
  static const MatrixKernels kernels = all_kernels("avx512");
  return kernels;
}
}  // namespace unshard::inference
