#include "inference/sample/sample_kernels.inc"

namespace unshard::inference {
const SampleKernels& sample_kernels_portable() { return UNSHARD_VEC_NS::kTable; }
}  // namespace unshard::inference
