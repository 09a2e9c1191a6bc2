#include "core/flat_math_kernels.inc"

namespace unshard::kernels {
const FlatKernels& flat_kernels_portable() { return UNSHARD_VEC_NS::kTable; }
}  // namespace unshard::kernels
