// AVX-512 with BF16: products of bf16 pairs.
#if defined(__x86_64__)
#define UNSHARD_VEC_AVX512
#endif
#include "inference/kernels/matrix_tiles.inc"

namespace unshard::inference {
namespace {
#if defined(__x86_64__)
struct Bf16PairStep {
  using Sum = Vec;
  static constexpr int kWeightBytes = 64, kInputBytes = 4;
  struct Weights {
    __m512i w;
  };
  static UNSHARD_INLINE Weights load(const std::uint8_t* p) { return {_mm512_loadu_si512(p)}; }
  static UNSHARD_INLINE Sum add(Sum sum, Weights w, const std::uint8_t* x) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(w.w), reinterpret_cast<__m512bh>(_mm512_set1_epi32(read<std::int32_t>(x))));
  }
};

void input_bf16(const float* x, std::int64_t cols, std::uint8_t* row) {
  auto* out = reinterpret_cast<std::uint16_t*>(row);
  isa::each_16(x, cols, [=](std::int64_t k, Vec v) UNSHARD_LAMBDA_INLINE { isa::store_u16(out + k, isa::to_bf16(v)); });
}
#endif
}  // namespace

void use_avx512_bf16([[maybe_unused]] MatrixKernels& kernels) {
#if defined(__x86_64__)
  fill<FloatTile, Bf16PairStep>(kernels.tile[kBf16]);
  kernels.input[kBf16] = &input_bf16;
  kernels.bf16_pairs = true;
#endif
}
}  // namespace unshard::inference
