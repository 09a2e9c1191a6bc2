// Sixteen lanes in plain C++; see lanes.h.
#pragma once

namespace unshard::isa_portable {

struct Int {
  std::int32_t lane[16];
};
struct Bytes {
  std::uint8_t byte[64];
};

template <class F>
UNSHARD_INLINE Int each_int(F f) {
  Int result;
  for (int i = 0; i < 16; ++i) result.lane[i] = f(i);
  return result;
}
template <class F>
UNSHARD_INLINE Bytes each_byte(F f) {
  Bytes result;
  for (int i = 0; i < 64; ++i) result.byte[i] = static_cast<std::uint8_t>(f(i));
  return result;
}

/// The compiler keeps these in vector registers of whatever width there is, which it doesn't manage with arrays.
using Floats = float __attribute__((vector_size(64)));

/// Rounded twice, unlike fma: processors without it would call a library function for every product.
UNSHARD_INLINE Vec madd(const Vec& a, const Vec& b, const Vec& c) {
  return __builtin_bit_cast(Vec, __builtin_bit_cast(Floats, a) * __builtin_bit_cast(Floats, b) + __builtin_bit_cast(Floats, c));
}
UNSHARD_INLINE Vec abs(const Vec& x) {
  return each([&](int i) { return __builtin_fabsf(x.lane[i]); });
}
UNSHARD_INLINE Vec max(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
UNSHARD_INLINE Vec min(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
UNSHARD_INLINE float largest(const Vec& x) {
  float result = x.lane[0];
  for (int i = 1; i < 16; ++i) result = x.lane[i] > result ? x.lane[i] : result;
  return result;
}
/// Sum of all lanes, in the same order in each set: halves, quarters, pairs.
UNSHARD_INLINE float total(Vec x) {
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) x.lane[i] += x.lane[i + width];
  }
  return x.lane[0];
}
/// 2^n for whole n in [-126, 127].
UNSHARD_INLINE Vec power_of_2(const Vec& n) {
  return each([&](int i) { return float_of(static_cast<std::uint32_t>(static_cast<std::int32_t>(n.lane[i]) + 127) << 23); });
}
/// Nearest even, kept within [-128, 127]; returns them. Adding 1.5 * 2^23 puts the last bit of a float at 1.
UNSHARD_INLINE Int store_rounded(std::int8_t* p, const Vec& x) {
  return each_int([&](int i) {
    const float kept = x.lane[i] > 127 ? 127 : x.lane[i] > -128 ? x.lane[i] : -128;
    const auto whole = static_cast<std::int32_t>(bits_of(kept + 12582912.0F) - bits_of(12582912.0F));
    p[i] = static_cast<std::int8_t>(whole);
    return whole;
  });
}
UNSHARD_INLINE Int add_int(const Int& a, const Int& b) {
  return each_int([&](int i) { return a.lane[i] + b.lane[i]; });
}
UNSHARD_INLINE std::int32_t total_int(const Int& x) {
  std::int32_t sum = 0;
  for (const std::int32_t lane : x.lane) sum += lane;
  return sum;
}
/// Whether all lanes are 0 (NaN isn't).
UNSHARD_INLINE bool all_zero(const Vec& x) {
  bool zero = true;
  for (const float lane : x.lane) zero = zero && lane == 0;
  return zero;
}
/// The even and the odd bf16 of 16 pairs.
UNSHARD_INLINE Vec even_bf16(const std::uint8_t* p) {
  return each([&](int i) {
    std::uint16_t half;
    __builtin_memcpy(&half, p + 4 * i, sizeof half);
    return float_of(static_cast<std::uint32_t>(half) << 16);
  });
}
UNSHARD_INLINE Vec odd_bf16(const std::uint8_t* p) { return even_bf16(p + 2); }

UNSHARD_INLINE Int set1_int(std::int32_t x) {
  return each_int([=](int) { return x; });
}
UNSHARD_INLINE Int load_int(const void* p) {
  Int result;
  __builtin_memcpy(&result, p, sizeof result);
  return result;
}
UNSHARD_INLINE void store_int(void* p, const Int& x) { __builtin_memcpy(p, &x, sizeof x); }
UNSHARD_INLINE Vec to_float(const Int& x) {
  return each([&](int i) { return static_cast<float>(x.lane[i]); });
}
UNSHARD_INLINE Bytes load_bytes(const std::uint8_t* p) {
  return each_byte([=](int i) { return p[i]; });
}
UNSHARD_INLINE Bytes low_halves(const Bytes& b) {
  return each_byte([&](int i) { return b.byte[i] & 15; });
}
UNSHARD_INLINE Bytes high_halves(const Bytes& b) {
  return each_byte([&](int i) { return b.byte[i] >> 4; });
}

constexpr bool kOffsetSums = true;
using Weights = Bytes;
UNSHARD_INLINE Weights offset_weights(const Bytes& b) { return b; }
UNSHARD_INLINE Weights small_weights(const Bytes& b) { return b; }
UNSHARD_INLINE Int dot(const Int& sum, const Weights& w, std::int32_t x) {
  std::int8_t inputs[4];
  __builtin_memcpy(inputs, &x, sizeof inputs);
  return each_int([&](int i) {
    std::int32_t lane = sum.lane[i];
    for (int j = 0; j < 4; ++j) lane += w.byte[4 * i + j] * inputs[j];
    return lane;
  });
}

}  // namespace unshard::isa_portable
