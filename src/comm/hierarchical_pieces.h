#pragma once
// How hierarchical collectives cut their work: in pieces, two of which are under way at a time.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "comm/control_block.h"

namespace unshard::comm {

inline std::byte* bytes_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

inline void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes && to != from) std::memcpy(to, from, bytes);
}

/// `bytes` in pieces of at most `limit`, whole elements of any dtype.
struct Chunks {
  std::size_t bytes, piece;
  std::uint64_t count;

  Chunks(std::size_t total, std::size_t limit)
      : bytes(total), piece(std::max<std::size_t>(limit / kCacheLine, 1) * kCacheLine), count((bytes + piece - 1) / piece) {}
  std::size_t offset(std::uint64_t k) const { return k * piece; }
  std::size_t length(std::uint64_t k) const { return std::min(piece, bytes - offset(k)); }
};

/// Elements cut in equal parts, of which the last ones may be short or empty.
struct Parts {
  std::size_t bytes, part;

  Parts(std::size_t total, std::size_t element, int count) : bytes(total) {
    const std::size_t elements = total / element, parts = static_cast<std::size_t>(count);
    part = (elements + parts - 1) / parts * element;
  }
  std::size_t begin(int index) const { return std::min(bytes, part * static_cast<std::size_t>(index)); }
  std::size_t length(int index) const { return begin(index + 1) - begin(index); }
};

/// begin(0), begin(1), end(0), begin(2), end(1), ...: a piece is prepared while the one before it travels.
template <class Begin, class End>
void pipelined(std::uint64_t count, Begin&& begin, End&& end) {
  for (std::uint64_t k = 0; k < count; ++k) {
    begin(k);
    if (k > 0) end(k - 1);
  }
  if (count > 0) end(count - 1);
}

}  // namespace unshard::comm
