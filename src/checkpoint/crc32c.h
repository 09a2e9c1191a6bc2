#pragma once
// CRC-32C (Castagnoli), the checksum of stored values; the CPU's instruction where it has one.
#include <cstddef>
#include <cstdint>

namespace unshard::checkpoint {

/// Checksum of `data` after bytes whose checksum is `crc` (0: none before).
std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t size);
/// The same without the CPU's instruction.
std::uint32_t crc32c_portable(std::uint32_t crc, const void* data, std::size_t size);

}  // namespace unshard::checkpoint
