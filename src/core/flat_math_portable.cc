#include "core/flat_math_kernels.inc"

namespace unshard::kernels {
const FlatKernels& flat_kernels_portable() { return isa_portable::kTable; }
}  // namespace unshard::kernels
