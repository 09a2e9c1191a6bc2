#pragma once
// 16-bit floats to and from float, value by value, on any processor. Rounds to nearest even; infinities and NaN stay what they are.
#include <bit>
#include <cstdint>

namespace unshard::inference {

inline float float_of_bf16(std::uint16_t h) { return std::bit_cast<float>(static_cast<std::uint32_t>(h) << 16); }

inline std::uint16_t bf16_of_float(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, nan = (bits >> 16) | 0x40;
  return static_cast<std::uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

inline float float_of_f16(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000) << 16, magnitude = static_cast<std::uint32_t>(h & 0x7fff) << 13;
  // Shifted, the exponent is 112 too small; the product puts that right for subnormals too, which it makes normal. No branch: it
  // vectorises.
  const float finite = std::bit_cast<float>(magnitude) * 0x1p112F;
  const std::uint32_t special = (h & 0x7c00) == 0x7c00 ? 0x7f800000U : 0U;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(finite) | special | sign);
}

inline std::uint16_t f16_of_float(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<std::uint16_t>(sign | 0x7e00 | ((magnitude >> 13) & 0x3ff));
  if (magnitude >= 0x477ff000) return static_cast<std::uint16_t>(sign | 0x7c00);  // 65520 and above
  if (magnitude < 0x38800000) {
    // Subnormal: adding 0.5 puts the value's last bit at 2^-24, so that the addition itself rounds.
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3f000000));
  }
  return static_cast<std::uint16_t>(sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13));
}

}  // namespace unshard::inference
