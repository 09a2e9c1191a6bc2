#pragma once
// What travels between a reader and a shard server: fixed-size structs, both ends little-endian. Reader: Hello once, then requests
// [RequestHeader, WantedPiece x count]; server: Welcome once, then per request [ReplyHeader, payload].
#include <array>
#include <bit>
#include <cstdint>

namespace unshard::wire {

static_assert(std::endian::native == std::endian::little, "the wire format is little-endian");

/// Proves that a connection comes from (and reaches) a rank of this group: the reader shows the first half, the server the second.
using Secret = std::array<std::uint8_t, 32>;
using HalfSecret = std::array<std::uint8_t, 16>;

struct Hello {
  HalfSecret secret;
  std::int32_t from, to;  ///< ranks: a connection that reaches another rank's server (same address, other host) is refused
};
struct Welcome {
  HalfSecret secret;
};
struct RequestHeader {
  std::uint32_t count;
  std::uint32_t reserved = 0;
};
struct WantedPiece {
  std::int64_t id;
  std::uint64_t bytes;  ///< what the reader's layout says; the server refuses when its own differs
};
struct ReplyHeader {
  std::uint64_t bytes;  ///< of the payload: all pieces one after the other, or the text of an error
  std::uint32_t failed, reserved = 0;
};

}  // namespace unshard::wire
