// AVX2 lanes, two registers for sixteen; see lanes.h.
#pragma once

namespace unshard::isa_avx2 {

struct Int {
  __m256i lo, hi;
};
using Bytes = Int;

UNSHARD_INLINE Vec madd(Vec a, Vec b, Vec c) { return fma(a, b, c); }
UNSHARD_INLINE __m256 abs_half(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0F), x); }
UNSHARD_INLINE Vec abs(Vec x) { return {abs_half(x.lo), abs_half(x.hi)}; }
UNSHARD_INLINE Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
UNSHARD_INLINE Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
UNSHARD_INLINE float largest(Vec x) {
  float lanes[8], result = 0;
  _mm256_storeu_ps(lanes, _mm256_max_ps(x.lo, x.hi));
  for (int i = 0; i < 8; ++i) result = i == 0 || lanes[i] > result ? lanes[i] : result;
  return result;
}
/// Sum of all lanes, in the same order in each set: halves, quarters, pairs.
UNSHARD_INLINE float total(Vec x) {
  const __m256 half = _mm256_add_ps(x.lo, x.hi);
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}
UNSHARD_INLINE __m256 power_of_2_half(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
/// 2^n for whole n in [-126, 127].
UNSHARD_INLINE Vec power_of_2(Vec n) { return {power_of_2_half(n.lo), power_of_2_half(n.hi)}; }
/// Nearest even, kept within [-128, 127]; returns them as they were before that.
UNSHARD_INLINE Int store_rounded(std::int8_t* p, Vec x) {
  const Int whole = {_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi)};
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(whole.lo, whole.hi), 0xd8);  // packs within 128-bit halves
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(low_half(words), high_half(words)));
  return whole;
}
UNSHARD_INLINE Int add_int(Int a, Int b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
UNSHARD_INLINE std::int32_t total_int(Int x) {
  const __m256i half = _mm256_add_epi32(x.lo, x.hi);
  const __m128i quarter = _mm_add_epi32(low_half(half), high_half(half)), pair = _mm_add_epi32(quarter, _mm_shuffle_epi32(quarter, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(pair, _mm_shuffle_epi32(pair, 0xb1)));
}
/// Whether all lanes are 0 (NaN isn't).
UNSHARD_INLINE bool all_zero(Vec x) {
  const __m256 none = _mm256_setzero_ps();
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(x.lo, none, _CMP_NEQ_UQ), _mm256_cmp_ps(x.hi, none, _CMP_NEQ_UQ))) == 0;
}
UNSHARD_INLINE Int load_int(const void* p) {
  const auto* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
UNSHARD_INLINE void store_int(void* p, Int x) {
  auto* q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, x.lo);
  _mm256_storeu_si256(q + 1, x.hi);
}
/// The even and the odd bf16 of 16 pairs.
UNSHARD_INLINE Vec even_bf16(const std::uint8_t* p) {
  const Int pairs = load_int(p);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs.lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(pairs.hi, 16))};
}
UNSHARD_INLINE Vec odd_bf16(const std::uint8_t* p) {
  const Int pairs = load_int(p);
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  return {_mm256_castsi256_ps(_mm256_and_si256(pairs.lo, mask)), _mm256_castsi256_ps(_mm256_and_si256(pairs.hi, mask))};
}

UNSHARD_INLINE Int set1_int(std::int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
UNSHARD_INLINE Vec to_float(Int x) { return {_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)}; }
UNSHARD_INLINE Bytes load_bytes(const std::uint8_t* p) { return load_int(p); }
UNSHARD_INLINE Bytes low_halves(Bytes b) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(b.lo, mask), _mm256_and_si256(b.hi, mask)};
}
UNSHARD_INLINE Bytes high_halves(Bytes b) { return low_halves({_mm256_srli_epi16(b.lo, 4), _mm256_srli_epi16(b.hi, 4)}); }

/// Sizes and signs apart: |w| * (x with w's sign) fits the 16 bits of VPMADDUBSW, also in pairs.
constexpr bool kOffsetSums = false;
struct Weights {
  Bytes size, sign;
};
UNSHARD_INLINE Weights offset_weights(Bytes b) {
  const __m256i offset = _mm256_set1_epi8(static_cast<char>(0x80));
  const Bytes w = {_mm256_xor_si256(b.lo, offset), _mm256_xor_si256(b.hi, offset)};
  return {{_mm256_abs_epi8(w.lo), _mm256_abs_epi8(w.hi)}, w};
}
/// Half bytes are their own size and sign (where 0, the product is 0 anyway).
UNSHARD_INLINE Weights small_weights(Bytes b) { return {b, b}; }
UNSHARD_INLINE __m256i dot_half(__m256i sum, __m256i size, __m256i sign, __m256i x) {
  const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(x, sign));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
UNSHARD_INLINE Int dot(Int sum, const Weights& w, std::int32_t x) {
  const __m256i inputs = _mm256_set1_epi32(x);
  return {dot_half(sum.lo, w.size.lo, w.sign.lo, inputs), dot_half(sum.hi, w.size.hi, w.sign.hi, inputs)};
}

}  // namespace unshard::isa_avx2
