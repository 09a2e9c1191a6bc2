#if defined(__x86_64__)
#define UNSHARD_VEC_AVX512
#endif
#include "inference/kernels/attention_store.inc"
#include "inference/kernels/attention_tile.inc"

namespace unshard::inference {
const AttentionKernels& attention_kernels_avx512() {
  namespace isa = UNSHARD_VEC_NS;
  static constexpr AttentionKernels kernels = {{isa::compute_tile<isa::F32>, isa::compute_tile<isa::BF16>, isa::compute_tile<isa::I8>},
                                               {isa::store_run<isa::F32>, isa::store_run<isa::BF16>, isa::store_run_i8},
                                               isa::merge_partials};
  return kernels;
}
}  // namespace unshard::inference
