// AVX-512 with VNNI: products of bytes.
#if defined(__x86_64__)
#define UNSHARD_VEC_AVX512
#define UNSHARD_LANES_VNNI
#endif
#include "inference/kernels/matrix_tiles.inc"

namespace unshard::inference {
void use_avx512_vnni(MatrixKernels& kernels) {
  fill<GroupTile, Q8Group>(kernels.tile[kQ8]);
  fill<GroupTile, Q4Group>(kernels.tile[kQ4]);
  fill<ByteTile, ByteStep>(kernels.tile[kW8a8]);
}
}  // namespace unshard::inference
