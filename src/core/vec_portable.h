// Sixteen lanes in plain C++, for any processor; see vec.h. Built without contraction: a multiply-add is fused only where it says fma.
#pragma once
#define UNSHARD_INLINE inline __attribute__((always_inline))
#define UNSHARD_LAMBDA_INLINE __attribute__((always_inline))

namespace unshard::isa_portable {

struct Vec {
  float lane[16];
};
struct Half16 {
  std::uint16_t lane[16];
};
struct Sum16 {
  double lane[16];
};

template <class F>
UNSHARD_INLINE Vec each(F f) {
  Vec result;
  for (int i = 0; i < 16; ++i) result.lane[i] = f(i);
  return result;
}
template <class F>
UNSHARD_INLINE Half16 each_half(F f) {
  Half16 result;
  for (int i = 0; i < 16; ++i) result.lane[i] = f(i);
  return result;
}
UNSHARD_INLINE std::uint32_t bits_of(float x) { return __builtin_bit_cast(std::uint32_t, x); }
UNSHARD_INLINE float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

UNSHARD_INLINE Vec set1(float x) {
  return each([=](int) { return x; });
}
UNSHARD_INLINE Vec zero() { return set1(0.0F); }
UNSHARD_INLINE Vec load_f32(const float* p) {
  return each([=](int i) { return p[i]; });
}
UNSHARD_INLINE void store_f32(float* p, const Vec& x) {
  for (int i = 0; i < 16; ++i) p[i] = x.lane[i];
}
UNSHARD_INLINE Vec add(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.lane[i] + b.lane[i]; });
}
UNSHARD_INLINE Vec sub(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.lane[i] - b.lane[i]; });
}
UNSHARD_INLINE Vec mul(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.lane[i] * b.lane[i]; });
}
UNSHARD_INLINE Vec div(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.lane[i] / b.lane[i]; });
}
UNSHARD_INLINE Vec sqrt(const Vec& a) {
  return each([&](int i) { return __builtin_sqrtf(a.lane[i]); });
}
/// a * b + c, rounded once.
UNSHARD_INLINE Vec fma(const Vec& a, const Vec& b, const Vec& c) {
  return each([&](int i) { return __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]); });
}
/// sign(x) * size; 0 for zero and NaN.
UNSHARD_INLINE Vec signed_as(const Vec& x, float size) {
  return each([&](int i) { return x.lane[i] > 0 ? size : x.lane[i] < 0 ? -size : 0.0F; });
}

UNSHARD_INLINE Half16 load_u16(const std::uint16_t* p) {
  return each_half([=](int i) { return p[i]; });
}
UNSHARD_INLINE void store_u16(std::uint16_t* p, const Half16& x) {
  for (int i = 0; i < 16; ++i) p[i] = x.lane[i];
}
UNSHARD_INLINE Vec from_bf16(const Half16& h) {
  return each([&](int i) { return float_of(static_cast<std::uint32_t>(h.lane[i]) << 16); });
}
UNSHARD_INLINE std::uint16_t bf16_bits(float x) {
  const std::uint32_t bits = bits_of(x), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, nan = (bits >> 16) | 0x40;
  return static_cast<std::uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}
UNSHARD_INLINE Half16 to_bf16(const Vec& x) {
  return each_half([&](int i) { return bf16_bits(x.lane[i]); });
}
UNSHARD_INLINE float f16_value(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000) << 16, exponent = (h >> 10) & 0x1f, fraction = h & 0x3ff;
  if (exponent == 0) {  // zero and subnormal: fraction * 2^-24, exact
    const float magnitude = static_cast<float>(fraction) * 0x1p-24F;
    return float_of(bits_of(magnitude) | sign);
  }
  if (exponent == 31) return float_of(sign | 0x7f800000 | (fraction << 13) | (fraction != 0 ? 0x400000 : 0));
  return float_of(sign | ((exponent + 112) << 23) | (fraction << 13));
}
UNSHARD_INLINE std::uint16_t f16_bits(float x) {
  const std::uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<std::uint16_t>(sign | 0x7e00 | ((magnitude >> 13) & 0x3ff));
  if (magnitude >= 0x477ff000) return static_cast<std::uint16_t>(sign | 0x7c00);  // 65520 and above round to infinity
  if (magnitude < 0x38800000) {                                                   // below 2^-14: units of 2^-24
    // Adding 0.5 puts the value's last bit at 2^-24, so that the addition itself rounds to nearest even.
    const float shifted = float_of(magnitude) + 0.5F;
    return static_cast<std::uint16_t>(sign | (bits_of(shifted) - 0x3f000000));
  }
  const std::uint32_t rounded = magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1);
  return static_cast<std::uint16_t>(sign | (rounded >> 13));
}
UNSHARD_INLINE Vec from_f16(const Half16& h) {
  return each([&](int i) { return f16_value(h.lane[i]); });
}
UNSHARD_INLINE Half16 to_f16(const Vec& x) {
  return each_half([&](int i) { return f16_bits(x.lane[i]); });
}
/// Lane by lane: a == b ? equal : other.
UNSHARD_INLINE Vec where_equal(const Half16& a, const Half16& b, const Vec& equal, const Vec& other) {
  return each([&](int i) { return a.lane[i] == b.lane[i] ? equal.lane[i] : other.lane[i]; });
}

UNSHARD_INLINE Sum16 sum_zero() { return {}; }
/// sum += x * x in double (the product of two floats is exact there, so fusing would not change it).
UNSHARD_INLINE void add_square(Sum16& sum, const Vec& x) {
  for (int i = 0; i < 16; ++i) {
    const double wide = x.lane[i];
    sum.lane[i] += wide * wide;
  }
}
UNSHARD_INLINE void sum_store(double* p, const Sum16& sum) {
  for (int i = 0; i < 16; ++i) p[i] = sum.lane[i];
}

}  // namespace unshard::isa_portable
