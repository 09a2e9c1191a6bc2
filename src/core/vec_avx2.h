// AVX2 + FMA + F16C lanes, two registers for sixteen; see vec.h.
#pragma once
#define UNSHARD_INLINE inline __attribute__((always_inline))
#define UNSHARD_LAMBDA_INLINE __attribute__((always_inline))

namespace unshard::isa_avx2 {

struct Vec {
  __m256 lo, hi;
};
using Half16 = __m256i;
struct Sum16 {
  __m256d part[4];
};

UNSHARD_INLINE Vec set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
UNSHARD_INLINE Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
UNSHARD_INLINE Vec load_f32(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
UNSHARD_INLINE void store_f32(float* p, Vec x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
UNSHARD_INLINE Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
UNSHARD_INLINE Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
UNSHARD_INLINE Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
UNSHARD_INLINE Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
UNSHARD_INLINE Vec sqrt(Vec a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
/// a * b + c, rounded once.
UNSHARD_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
UNSHARD_INLINE __m256 signed_half(__m256 x, float size) {
  const __m256 none = _mm256_setzero_ps();
  const __m256 positive = _mm256_and_ps(_mm256_cmp_ps(x, none, _CMP_GT_OQ), _mm256_set1_ps(size));
  const __m256 negative = _mm256_and_ps(_mm256_cmp_ps(x, none, _CMP_LT_OQ), _mm256_set1_ps(-size));
  return _mm256_or_ps(positive, negative);
}
/// sign(x) * size; 0 for zero and NaN.
UNSHARD_INLINE Vec signed_as(Vec x, float size) { return {signed_half(x.lo, size), signed_half(x.hi, size)}; }

UNSHARD_INLINE __m128i low_half(__m256i h) { return _mm256_castsi256_si128(h); }
UNSHARD_INLINE __m128i high_half(__m256i h) { return _mm256_extracti128_si256(h, 1); }
UNSHARD_INLINE Half16 load_u16(const std::uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
UNSHARD_INLINE void store_u16(std::uint16_t* p, Half16 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
UNSHARD_INLINE Vec from_bf16(Half16 h) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(low_half(h)), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(high_half(h)), 16))};
}
UNSHARD_INLINE __m256i bf16_bits(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  const __m256i nan = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(rounded, nan, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
UNSHARD_INLINE Half16 to_bf16(Vec x) {
  const __m256i packed = _mm256_packus_epi32(bf16_bits(x.lo), bf16_bits(x.hi));  // packs within 128-bit halves
  return _mm256_permute4x64_epi64(packed, 0xd8);
}
UNSHARD_INLINE Vec from_f16(Half16 h) { return {_mm256_cvtph_ps(low_half(h)), _mm256_cvtph_ps(high_half(h))}; }
UNSHARD_INLINE Half16 to_f16(Vec x) {
  return _mm256_set_m128i(_mm256_cvtps_ph(x.hi, _MM_FROUND_TO_NEAREST_INT), _mm256_cvtps_ph(x.lo, _MM_FROUND_TO_NEAREST_INT));
}
/// Lane by lane: a == b ? equal : other.
UNSHARD_INLINE Vec where_equal(Half16 a, Half16 b, Vec equal, Vec other) {
  const __m256i mask = _mm256_cmpeq_epi16(a, b);
  return {_mm256_blendv_ps(other.lo, equal.lo, _mm256_castsi256_ps(_mm256_cvtepi16_epi32(low_half(mask)))),
          _mm256_blendv_ps(other.hi, equal.hi, _mm256_castsi256_ps(_mm256_cvtepi16_epi32(high_half(mask))))};
}

UNSHARD_INLINE Sum16 sum_zero() {
  const __m256d none = _mm256_setzero_pd();
  return {{none, none, none, none}};
}
UNSHARD_INLINE void add_square_part(__m256d& sum, __m128 x) {
  const __m256d wide = _mm256_cvtps_pd(x);
  sum = _mm256_fmadd_pd(wide, wide, sum);
}
/// sum += x * x in double (the product of two floats is exact there).
UNSHARD_INLINE void add_square(Sum16& sum, Vec x) {
  add_square_part(sum.part[0], _mm256_castps256_ps128(x.lo));
  add_square_part(sum.part[1], _mm256_extractf128_ps(x.lo, 1));
  add_square_part(sum.part[2], _mm256_castps256_ps128(x.hi));
  add_square_part(sum.part[3], _mm256_extractf128_ps(x.hi, 1));
}
UNSHARD_INLINE void sum_store(double* p, const Sum16& sum) {
  for (int i = 0; i < 4; ++i) _mm256_storeu_pd(p + 4 * i, sum.part[i]);
}

}  // namespace unshard::isa_avx2
