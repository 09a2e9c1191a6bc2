#include "inference/kernels/matrix_kernels.inc"

namespace unshard::inference {
const MatrixKernels& matrix_kernels_portable() {
  static const MatrixKernels kernels = all_kernels("portable");
  return kernels;
}
}  // namespace unshard::inference
