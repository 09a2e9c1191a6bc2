#pragma once
// What sampling needs beyond core/vec.h, for each instruction set: maxima, comparisons, and the exponential. Same bits in all sets.
#include "core/vec.h"

namespace unshard::UNSHARD_VEC_NS {

#if defined(UNSHARD_VEC_AVX512)

UNSHARD_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
/// Bit i: a[i] >= b[i]. NaN is not.
UNSHARD_INLINE unsigned at_least(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
UNSHARD_INLINE unsigned nan_bits(Vec x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
/// key >= limit ? x : 0
UNSHARD_INLINE Vec zero_below(Vec x, Vec key, Vec limit) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(key, limit, _CMP_GE_OQ), x); }
/// Bit i ? a[i] : b[i]
UNSHARD_INLINE Vec choose_bits(unsigned bits, Vec a, Vec b) { return _mm512_mask_mov_ps(b, static_cast<__mmask16>(bits), a); }
/// x * 2^n, where `shifted` is n + 1.5 * 2^23: its low bits are n, and go to the exponent.
UNSHARD_INLINE Vec scale_by_power(Vec x, Vec shifted) {
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_slli_epi32(_mm512_castps_si512(shifted), 23)));
}
/// Store the lanes whose bit is set, packed; writes 16. \return how many were set
UNSHARD_INLINE int pack(float* out, unsigned bits, Vec x) {
  _mm512_storeu_ps(out, _mm512_maskz_compress_ps(static_cast<__mmask16>(bits), x));
  return __builtin_popcount(bits);
}
/// The same of 16 ids, or of first, first + 1, ... where `ids` is null.
UNSHARD_INLINE int pack_ids(std::int32_t* out, unsigned bits, const std::int32_t* ids, std::int32_t first) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i from = ids != nullptr ? _mm512_loadu_si512(ids) : _mm512_add_epi32(lane, _mm512_set1_epi32(first));
  _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(static_cast<__mmask16>(bits), from));
  return __builtin_popcount(bits);
}

#elif defined(UNSHARD_VEC_AVX2)

UNSHARD_INLINE Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
UNSHARD_INLINE unsigned both(__m256 lo, __m256 hi) {
  return static_cast<unsigned>(_mm256_movemask_ps(lo)) | static_cast<unsigned>(_mm256_movemask_ps(hi)) << 8;
}
UNSHARD_INLINE unsigned at_least(Vec a, Vec b) {
  return both(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ));
}
UNSHARD_INLINE unsigned nan_bits(Vec x) { return both(_mm256_cmp_ps(x.lo, x.lo, _CMP_UNORD_Q), _mm256_cmp_ps(x.hi, x.hi, _CMP_UNORD_Q)); }
UNSHARD_INLINE Vec zero_below(Vec x, Vec key, Vec limit) {
  return {_mm256_and_ps(x.lo, _mm256_cmp_ps(key.lo, limit.lo, _CMP_GE_OQ)),
          _mm256_and_ps(x.hi, _mm256_cmp_ps(key.hi, limit.hi, _CMP_GE_OQ))};
}
UNSHARD_INLINE __m256 mask_of(unsigned bits) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane), lane));
}
UNSHARD_INLINE Vec choose_bits(unsigned bits, Vec a, Vec b) {
  return {_mm256_blendv_ps(b.lo, a.lo, mask_of(bits)), _mm256_blendv_ps(b.hi, a.hi, mask_of(bits >> 8))};
}
UNSHARD_INLINE __m256 scale_half(__m256 x, __m256 shifted) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(shifted), 23)));
}
UNSHARD_INLINE Vec scale_by_power(Vec x, Vec shifted) { return {scale_half(x.lo, shifted.lo), scale_half(x.hi, shifted.hi)}; }

#else

UNSHARD_INLINE Vec max(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
template <class F>
UNSHARD_INLINE unsigned bits_where(F f) {
  unsigned bits = 0;
  for (int i = 0; i < 16; ++i) bits |= static_cast<unsigned>(f(i)) << i;
  return bits;
}
UNSHARD_INLINE unsigned at_least(const Vec& a, const Vec& b) {
  return bits_where([&](int i) { return a.lane[i] >= b.lane[i]; });
}
UNSHARD_INLINE unsigned nan_bits(const Vec& x) {
  return bits_where([&](int i) { return x.lane[i] != x.lane[i]; });
}
UNSHARD_INLINE Vec zero_below(const Vec& x, const Vec& key, const Vec& limit) {
  return each([&](int i) { return key.lane[i] >= limit.lane[i] ? x.lane[i] : 0.0F; });
}
UNSHARD_INLINE Vec choose_bits(unsigned bits, const Vec& a, const Vec& b) {
  return each([&](int i) { return (bits >> i & 1) != 0 ? a.lane[i] : b.lane[i]; });
}
UNSHARD_INLINE Vec scale_by_power(const Vec& x, const Vec& shifted) {
  return each([&](int i) { return float_of(bits_of(x.lane[i]) + (bits_of(shifted.lane[i]) << 23)); });
}

#endif

#if !defined(UNSHARD_VEC_AVX512)
UNSHARD_INLINE int pack(float* out, unsigned bits, const Vec& x) {
  float lanes[16];
  store_f32(lanes, x);
  int count = 0;
  for (; bits != 0; bits &= bits - 1) out[count++] = lanes[__builtin_ctz(bits)];
  return count;
}
UNSHARD_INLINE int pack_ids(std::int32_t* out, unsigned bits, const std::int32_t* ids, std::int32_t first) {
  int count = 0;
  for (; bits != 0; bits &= bits - 1) {
    const int lane = __builtin_ctz(bits);
    out[count++] = ids != nullptr ? ids[lane] : first + lane;
  }
  return count;
}
#endif

/// exp(z) for z <= 0 to 2.4e-7 relative; 0 below -87, where floats become subnormal. Range reduction to |f| <= ln2 / 2 and the Taylor
/// polynomial of degree 6, whose remainder there is 1.2e-7.
UNSHARD_INLINE Vec exp_negative(Vec z) {
  const Vec lowest = set1(-87.0F), magic = set1(12582912.0F);
  const Vec bounded = max(z, lowest);
  const Vec shifted = fma(bounded, set1(1.44269504F), magic);
  const Vec n = sub(shifted, magic);
  const Vec f = fma(n, set1(2.12194440e-4F), fma(n, set1(-0.693359375F), bounded));
  Vec p = set1(1.0F / 720);
  constexpr float kFactors[] = {1.0F / 120, 1.0F / 24, 1.0F / 6, 0.5F, 1.0F, 1.0F};
  for (const float factor : kFactors) p = fma(p, f, set1(factor));
  return zero_below(scale_by_power(p, shifted), z, lowest);
}

}  // namespace unshard::UNSHARD_VEC_NS
