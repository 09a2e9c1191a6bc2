#if defined(__x86_64__)
#define UNSHARD_VEC_AVX2
#endif
#include "inference/kernels/matrix_kernels.inc"

namespace unshard::inference {
const MatrixKernels& matrix_kernels_avx2() {
  static const MatrixKernels kernels = all_kernels("avx2");
  return kernels;
}
}  // namespace unshard::inference
