#pragma once
// Random numbers without a state: the i-th of a seed, so that a sequence draws the same ones whatever runs beside it.
#include <cstdint>

namespace unshard::inference {

/// The finaliser of splitmix64 (Steele, Lea, Flood 2014), a bijection in which every input bit changes every output bit.
inline std::uint64_t mix_bits(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

/// In [0, 1), a multiple of 2^-53. The seed is mixed before the counter joins it, so that neighbouring seeds are no shifted copies.
inline double uniform_draw(std::uint64_t seed, std::uint64_t index) {
  const std::uint64_t start = mix_bits(seed + 0x9e3779b97f4a7c15U);
  return static_cast<double>(mix_bits(start + (index + 1) * 0x9e3779b97f4a7c15U) >> 11) * 0x1p-53;
}

}  // namespace unshard::inference
