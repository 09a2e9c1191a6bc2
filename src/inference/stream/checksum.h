#pragma once
// Is what was read what was written? Not against forgery.
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace unshard::inference {

/// Of 64 bits; a change within one word of eight bytes always changes it, since each step is reversible. About as fast as memory is read.
inline std::uint64_t checksum(const void* data, std::size_t bytes) {
  constexpr std::size_t kLanes = 4;
  constexpr std::uint64_t kOdd = 0x9E3779B97F4A7C15;
  std::array<std::uint64_t, kLanes> lanes = {1, 2, 3, 4};
  const auto* at = static_cast<const std::byte*>(data);
  const auto step = [](std::uint64_t state, std::uint64_t word) { return std::rotl((state ^ word) * kOdd, 29); };
  std::size_t left = bytes;
  for (; left >= sizeof lanes; left -= sizeof lanes, at += sizeof lanes) {
    std::array<std::uint64_t, kLanes> words;
    std::memcpy(words.data(), at, sizeof words);
    for (std::size_t i = 0; i < kLanes; ++i) lanes[i] = step(lanes[i], words[i]);
  }
  std::array<std::uint64_t, kLanes> words{};
  std::memcpy(words.data(), at, left);
  for (std::size_t i = 0; i < kLanes; ++i) lanes[i] = step(lanes[i], words[i]);
  std::uint64_t all = bytes;
  for (const auto lane : lanes) all = step(all, lane);
  return all ^ (all >> 32);
}

}  // namespace unshard::inference
