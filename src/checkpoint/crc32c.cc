#include "checkpoint/crc32c.h"

#include <array>
#include <bit>
#include <cstring>

namespace unshard::checkpoint {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // reflected

// tables[k][b]: what byte b does to the checksum k bytes later, so that eight bytes are taken at once.
constexpr auto kTables = [] {
  std::array<std::array<std::uint32_t, 256>, 8> tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const auto before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}();

std::uint64_t word_at(const unsigned char* bytes) {
  std::uint64_t word;
  std::memcpy(&word, bytes, 8);
  return word;
}

#if defined(__x86_64__)
// a * b modulo the polynomial; the highest bit is x^0.
constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (std::uint32_t bit = 1U << 31; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = (b >> 1) ^ ((b & 1) != 0 ? kPolynomial : 0);
  }
  return product;
}

// [Note: three stripes] The instruction takes 8 bytes a cycle but has its result after three, so three stripes of kStripe bytes are summed
// side by side. A sum is linear: that of two stripes in a row is the first one's as if zeros followed, plus the second's from zero on.
constexpr std::size_t kStripe = 2048;

// kOverStripe[k][b]: what byte k of a sum, of value b, becomes over kStripe zeros.
constexpr auto kOverStripe = [] {
  std::uint32_t power = 1U << 30;  // x
  for (std::size_t bits = 1; bits < 8 * kStripe; bits *= 2) power = multiply(power, power);
  std::array<std::array<std::uint32_t, 256>, 4> table{};
  for (std::size_t k = 0; k < 4; ++k) {
    for (std::uint32_t byte = 0; byte < 256; ++byte) table[k][byte] = multiply(power, byte << (8 * k));
  }
  return table;
}();

std::uint32_t over_stripe(std::uint64_t sum) {
  return kOverStripe[0][sum & 0xFF] ^ kOverStripe[1][(sum >> 8) & 0xFF] ^ kOverStripe[2][(sum >> 16) & 0xFF] ^
         kOverStripe[3][(sum >> 24) & 0xFF];
}

__attribute__((target("sse4.2"))) std::uint32_t crc32c_sse42(std::uint32_t crc, const unsigned char* bytes, std::size_t size) {
  std::uint64_t state = ~crc;
  for (; size >= 3 * kStripe; size -= 3 * kStripe, bytes += 3 * kStripe) {
    std::uint64_t second = 0, third = 0;
    for (std::size_t i = 0; i < kStripe; i += 8) {
      state = __builtin_ia32_crc32di(state, word_at(bytes + i));
      second = __builtin_ia32_crc32di(second, word_at(bytes + kStripe + i));
      third = __builtin_ia32_crc32di(third, word_at(bytes + 2 * kStripe + i));
    }
    state = over_stripe(over_stripe(state) ^ second) ^ third;
  }
  for (; size >= 8; size -= 8, bytes += 8) state = __builtin_ia32_crc32di(state, word_at(bytes));
  auto narrow = static_cast<std::uint32_t>(state);
  for (; size > 0; --size, ++bytes) narrow = __builtin_ia32_crc32qi(narrow, *bytes);
  return ~narrow;
}
#endif

}  // namespace

std::uint32_t crc32c_portable(std::uint32_t crc, const void* data, std::size_t size) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  std::uint32_t state = ~crc;
  if constexpr (std::endian::native == std::endian::little) {
    for (; size >= 8; size -= 8, bytes += 8) {
      const auto word = word_at(bytes) ^ state;
      state = 0;
      for (std::size_t k = 0; k < 8; ++k) state ^= kTables[7 - k][(word >> (8 * k)) & 0xFF];
    }
  }
  for (; size > 0; --size, ++bytes) state = (state >> 8) ^ kTables[0][(state ^ *bytes) & 0xFF];
  return ~state;
}

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t size) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return crc32c_sse42(crc, static_cast<const unsigned char*>(data), size);
#endif
  return crc32c_portable(crc, data, size);
}

}  // namespace unshard::checkpoint
