// AVX-512 lanes; see lanes.h. With UNSHARD_LANES_VNNI bytes are multiplied by VPDPBUSD.
#pragma once

namespace unshard::isa_avx512 {

using Int = __m512i;    ///< 16 int32
using Bytes = __m512i;  ///< 4 bytes in each of 16 lanes

UNSHARD_INLINE Vec madd(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
UNSHARD_INLINE Vec abs(Vec x) { return _mm512_abs_ps(x); }
UNSHARD_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
UNSHARD_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
UNSHARD_INLINE float largest(Vec x) { return _mm512_reduce_max_ps(x); }
/// Sum of all lanes, in the same order in each set: halves, quarters, pairs.
UNSHARD_INLINE float total(Vec x) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}
/// 2^n for whole n in [-126, 127].
UNSHARD_INLINE Vec power_of_2(Vec n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
/// Nearest even, kept within [-128, 127]; returns them as they were before that.
UNSHARD_INLINE Int store_rounded(std::int8_t* p, Vec x) {
  const Int whole = _mm512_cvtps_epi32(x);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(whole));
  return whole;
}
UNSHARD_INLINE Int add_int(Int a, Int b) { return _mm512_add_epi32(a, b); }
UNSHARD_INLINE std::int32_t total_int(Int x) { return _mm512_reduce_add_epi32(x); }
/// Whether all lanes are 0 (NaN isn't).
UNSHARD_INLINE bool all_zero(Vec x) { return _mm512_cmp_ps_mask(x, zero(), _CMP_NEQ_UQ) == 0; }
/// The even and the odd bf16 of 16 pairs.
UNSHARD_INLINE Vec even_bf16(const std::uint8_t* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
UNSHARD_INLINE Vec odd_bf16(const std::uint8_t* p) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}

UNSHARD_INLINE Int set1_int(std::int32_t x) { return _mm512_set1_epi32(x); }
UNSHARD_INLINE Int load_int(const void* p) { return _mm512_loadu_si512(p); }
UNSHARD_INLINE void store_int(void* p, Int x) { _mm512_storeu_si512(p, x); }
UNSHARD_INLINE Vec to_float(Int x) { return _mm512_cvtepi32_ps(x); }
UNSHARD_INLINE Bytes load_bytes(const std::uint8_t* p) { return _mm512_loadu_si512(p); }
UNSHARD_INLINE Bytes low_halves(Bytes b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
UNSHARD_INLINE Bytes high_halves(Bytes b) { return low_halves(_mm512_srli_epi16(b, 4)); }

#if defined(UNSHARD_LANES_VNNI)
/// Weights as VPDPBUSD takes them: bytes plus 128, or half bytes. A sum over the former starts at -128 * (sum of inputs).
constexpr bool kOffsetSums = true;
using Weights = Bytes;
UNSHARD_INLINE Weights offset_weights(Bytes b) { return b; }
UNSHARD_INLINE Weights small_weights(Bytes b) { return b; }
UNSHARD_INLINE Int dot(Int sum, Weights w, std::int32_t x) { return _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(x)); }
#else
/// Sizes and signs apart: |w| * (x with w's sign) fits the 16 bits of VPMADDUBSW, also in pairs.
constexpr bool kOffsetSums = false;
struct Weights {
  Bytes size;
  __mmask64 negative;
};
UNSHARD_INLINE Weights offset_weights(Bytes b) {
  const Bytes w = _mm512_xor_si512(b, _mm512_set1_epi8(static_cast<char>(0x80)));
  return {_mm512_abs_epi8(w), _mm512_movepi8_mask(w)};
}
UNSHARD_INLINE Weights small_weights(Bytes b) { return {b, 0}; }
UNSHARD_INLINE Int dot(Int sum, Weights w, std::int32_t x) {
  const Bytes inputs = _mm512_set1_epi32(x), turned = _mm512_mask_sub_epi8(inputs, w.negative, _mm512_setzero_si512(), inputs);
  return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(w.size, turned), _mm512_set1_epi16(1)));
}
#endif

}  // namespace unshard::isa_avx512
