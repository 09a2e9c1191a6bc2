// What attention and row operations need beyond core/vec.h: sums and maxima across lanes, exp, bytes. Same rules as there; but for the
// portable set, where a multiply-add rounds twice (fused ones are a library call there), results have the same bits in every set.
#pragma once
#include "core/vec.h"

namespace unshard::UNSHARD_VEC_NS::math {

#if defined(UNSHARD_VEC_AVX512)

UNSHARD_INLINE Vec mul_add(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
/// b where one of them is NaN.
UNSHARD_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
UNSHARD_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
UNSHARD_INLINE Vec abs(Vec x) { return _mm512_abs_ps(x); }
UNSHARD_INLINE Vec nearest(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
/// 2^n, n a whole number in [-126, 127].
UNSHARD_INLINE Vec power2(Vec n) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtps_epi32(add(n, set1(127))), 23)); }
/// Lane by lane: x < y ? less : other (NaN: other).
UNSHARD_INLINE Vec where_less(Vec x, Vec y, Vec less, Vec other) {
  return _mm512_mask_mov_ps(other, _mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), less);
}
UNSHARD_INLINE __m256 fold_add(Vec x) { return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)); }
UNSHARD_INLINE __m256 fold_max(Vec x) { return _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)); }
UNSHARD_INLINE Vec load_i8(const std::int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
constexpr int kRegisters = 32;  ///< Vecs that fit

#elif defined(UNSHARD_VEC_AVX2)

UNSHARD_INLINE Vec mul_add(Vec a, Vec b, Vec c) { return fma(a, b, c); }
UNSHARD_INLINE Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
UNSHARD_INLINE Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
UNSHARD_INLINE Vec abs(Vec x) {
  const __m256 sign = _mm256_set1_ps(-0.0F);
  return {_mm256_andnot_ps(sign, x.lo), _mm256_andnot_ps(sign, x.hi)};
}
UNSHARD_INLINE Vec nearest(Vec x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.lo, mode), _mm256_round_ps(x.hi, mode)};
}
UNSHARD_INLINE __m256 power2(__m256 biased) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtps_epi32(biased), 23)); }
UNSHARD_INLINE Vec power2(Vec n) {
  const Vec biased = add(n, set1(127));
  return {power2(biased.lo), power2(biased.hi)};
}
UNSHARD_INLINE Vec where_less(Vec x, Vec y, Vec less, Vec other) {
  return {_mm256_blendv_ps(other.lo, less.lo, _mm256_cmp_ps(x.lo, y.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(other.hi, less.hi, _mm256_cmp_ps(x.hi, y.hi, _CMP_LT_OQ))};
}
UNSHARD_INLINE __m256 fold_add(Vec x) { return _mm256_add_ps(x.lo, x.hi); }
UNSHARD_INLINE __m256 fold_max(Vec x) { return _mm256_max_ps(x.lo, x.hi); }
UNSHARD_INLINE Vec load_i8(const std::int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
constexpr int kRegisters = 8;

#else

UNSHARD_INLINE Vec mul_add(const Vec& a, const Vec& b, const Vec& c) {
  return each([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
}
UNSHARD_INLINE Vec max(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
UNSHARD_INLINE Vec min(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
UNSHARD_INLINE Vec abs(const Vec& x) {
  return each([&](int i) { return x.lane[i] < 0 ? -x.lane[i] : x.lane[i]; });
}
/// For |x| < 2^22: adding 1.5 * 2^23 leaves no bits for a fraction.
UNSHARD_INLINE Vec nearest(const Vec& x) {
  return each([&](int i) { return x.lane[i] + 12582912.0F - 12582912.0F; });
}
/// 2^23 + m has m as its last bits, which the shift makes the exponent (a NaN gives anything, without a cast that it would make undefined).
UNSHARD_INLINE Vec power2(const Vec& n) {
  return each([&](int i) { return float_of(bits_of(n.lane[i] + 127 + 8388608.0F) << 23); });
}
UNSHARD_INLINE Vec where_less(const Vec& x, const Vec& y, const Vec& less, const Vec& other) {
  return each([&](int i) { return x.lane[i] < y.lane[i] ? less.lane[i] : other.lane[i]; });
}
UNSHARD_INLINE Vec load_i8(const std::int8_t* p) {
  return each([=](int i) { return static_cast<float>(p[i]); });
}
constexpr int kRegisters = 4;

#endif

#if defined(UNSHARD_VEC_AVX512) || defined(UNSHARD_VEC_AVX2)
/// Lanes i and i + 8 first, then i and i + 4, i + 2, i + 1.
UNSHARD_INLINE float sum(Vec x) {
  const __m256 eight = fold_add(x);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
UNSHARD_INLINE float largest(Vec x) {
  const __m256 eight = fold_max(x);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#else
UNSHARD_INLINE float sum(const Vec& x) {
  float part[16];
  for (int i = 0; i < 16; ++i) part[i] = x.lane[i];
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) part[i] += part[i + half];
  return part[0];
}
UNSHARD_INLINE float largest(const Vec& x) {
  float most = x.lane[0];
  for (int i = 1; i < 16; ++i) most = x.lane[i] > most ? x.lane[i] : most;
  return most;
}
#endif

/// e^x to 2 units in the last place; exactly 1 for 0; exactly 0 below -87.3 (where a float becomes subnormal); at most e^88; NaN stays.
UNSHARD_INLINE Vec exp(Vec x) {
  const Vec low = set1(-87.3F), inside = min(set1(88), max(low, x));
  const Vec n = nearest(mul(inside, set1(0x1.715476p+0F)));  // log2(e)
  Vec r = mul_add(n, set1(-0x1.62e4p-1F), inside);           // ln 2 in two parts, the first exact times n
  r = mul_add(n, set1(-0x1.7f7d1cp-20F), r);
  Vec p = mul_add(set1(0.0013934534508734941F), r, set1(0.008363769389688969F));  // (e^r - 1 - r) / r^2 on [-0.35, 0.35], Chebyshev
  p = mul_add(p, r, set1(0.04166645556688309F));
  p = mul_add(p, r, set1(0.16666573286056519F));
  p = mul_add(p, r, set1(0.5F));
  p = add(mul_add(mul(p, r), r, r), set1(1));
  return where_less(x, low, zero(), mul(p, power2(n)));
}

/// tanh(x), to 1e-7 of 1.
UNSHARD_INLINE Vec tanh(Vec x) { return sub(set1(1), div(set1(2), add(set1(1), exp(add(x, x))))); }

/// erfc(z) for z >= 0, to about 2e-7 of itself (up to rounding of z^2): t P(t) e^(-z^2), t = 1 / (1 + 0.4 z), P fitted on Chebyshev nodes.
UNSHARD_INLINE Vec erfc(Vec z) {
  constexpr float kP[] = {0.22562630474567413F, 0.22657176852226257F, 0.20101246237754822F,  0.19666031002998352F, 0.07241395860910416F,
                          0.09816670417785645F, 0.07540342956781387F, -0.13631001114845276F, 0.04045513644814491F};
  const Vec t = div(set1(1), mul_add(z, set1(0.4F), set1(1)));
  Vec p = set1(kP[8]);
  for (int i = 7; i >= 0; --i) p = mul_add(p, t, set1(kP[i]));
  return mul(mul(t, p), exp(mul(mul(z, z), set1(-1))));
}

}  // namespace unshard::UNSHARD_VEC_NS::math
