#include "optim/update_kernels.inc"

namespace unshard::kernels {
const UpdateKernels& update_kernels_portable() { return UNSHARD_VEC_NS::kTable; }
}  // namespace unshard::kernels
