#if defined(__x86_64__)
#define UNSHARD_VEC_AVX2
#endif
#include "optim/update_kernels.inc"

namespace unshard::kernels {
const UpdateKernels& update_kernels_avx2() { return UNSHARD_VEC_NS::kTable; }
}  // namespace unshard::kernels
