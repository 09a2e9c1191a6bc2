#include "inference/kernels/rows_kernels.inc"

namespace unshard::inference {
const RowKernels& row_kernels_portable() { return UNSHARD_VEC_NS::kRows; }
}  // namespace unshard::inference
