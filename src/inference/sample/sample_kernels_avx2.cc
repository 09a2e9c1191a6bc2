#if defined(__x86_64__)
#define UNSHARD_VEC_AVX2
#endif
#include "inference/sample/sample_kernels.inc"

namespace unshard::inference {
const SampleKernels& sample_kernels_avx2() { return UNSHARD_VEC_NS::kTable; }
}  // namespace unshard::inference
