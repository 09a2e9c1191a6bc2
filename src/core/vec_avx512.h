// AVX-512 lanes; see vec.h. bf16 is rounded with integer operations: vcvtneps2bf16 would flush subnormals.
#pragma once
#define UNSHARD_INLINE inline __attribute__((always_inline))
#define UNSHARD_LAMBDA_INLINE __attribute__((always_inline))

namespace unshard::isa_avx512 {

using Vec = __m512;
using Half16 = __m256i;
struct Sum16 {
  __m512d lo, hi;
};

UNSHARD_INLINE Vec zero() { return _mm512_setzero_ps(); }
UNSHARD_INLINE Vec set1(float x) { return _mm512_set1_ps(x); }
UNSHARD_INLINE Vec load_f32(const float* p) { return _mm512_loadu_ps(p); }
UNSHARD_INLINE void store_f32(float* p, Vec x) { _mm512_storeu_ps(p, x); }
UNSHARD_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
UNSHARD_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
UNSHARD_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
UNSHARD_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
UNSHARD_INLINE Vec sqrt(Vec a) { return _mm512_sqrt_ps(a); }
/// a * b + c, rounded once.
UNSHARD_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
/// sign(x) * size; 0 for zero and NaN.
UNSHARD_INLINE Vec signed_as(Vec x, float size) {
  const Vec positive = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, zero(), _CMP_GT_OQ), set1(size));
  return _mm512_mask_mov_ps(positive, _mm512_cmp_ps_mask(x, zero(), _CMP_LT_OQ), set1(-size));
}

UNSHARD_INLINE Half16 load_u16(const std::uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
UNSHARD_INLINE void store_u16(std::uint16_t* p, Half16 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
UNSHARD_INLINE Vec from_bf16(Half16 h) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)); }
UNSHARD_INLINE Half16 to_bf16(Vec x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __m512i nan = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan));
}
UNSHARD_INLINE Vec from_f16(Half16 h) { return _mm512_cvtph_ps(h); }
UNSHARD_INLINE Half16 to_f16(Vec x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
/// Lane by lane: a == b ? equal : other.
UNSHARD_INLINE Vec where_equal(Half16 a, Half16 b, Vec equal, Vec other) {
  return _mm512_mask_mov_ps(other, _mm256_cmpeq_epi16_mask(a, b), equal);
}

UNSHARD_INLINE Sum16 sum_zero() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
/// sum += x * x in double (the product of two floats is exact there).
UNSHARD_INLINE void add_square(Sum16& sum, Vec x) {
  const __m512d lo = _mm512_cvtps_pd(_mm512_castps512_ps256(x)), hi = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
  sum.lo = _mm512_fmadd_pd(lo, lo, sum.lo);
  sum.hi = _mm512_fmadd_pd(hi, hi, sum.hi);
}
UNSHARD_INLINE void sum_store(double* p, const Sum16& sum) {
  _mm512_storeu_pd(p, sum.lo);
  _mm512_storeu_pd(p + 8, sum.hi);
}

}  // namespace unshard::isa_avx512
