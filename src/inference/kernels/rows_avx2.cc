#if defined(__x86_64__)
#define UNSHARD_VEC_AVX2
#endif
#include "inference/kernels/rows_kernels.inc"

namespace unshard::inference {
const RowKernels& row_kernels_avx2() { return UNSHARD_VEC_NS::kRows; }
}  // namespace unshard::inference
