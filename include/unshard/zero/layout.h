#pragma once
// Which elements of a parameter rest on which rank. One layout for every ZeRO stage and for checkpoints.
#include <algorithm>
#include <cstdint>

namespace unshard {

/// A tensor's elements in storage order, cut evenly over `world_size` ranks; the last pieces may be short or empty (padding).
struct ShardLayout {
  std::int64_t numel = 0;
  int world_size = 1;

  /// ceil(numel / world_size): elements of memory each rank sets aside.
  std::int64_t shard_numel() const { return (numel + world_size - 1) / world_size; }
  std::int64_t padded_numel() const { return shard_numel() * world_size; }
  std::int64_t begin(int rank) const { return std::min(numel, shard_numel() * rank); }
  std::int64_t end(int rank) const { return std::min(numel, shard_numel() * (rank + 1)); }
  /// Real elements of `rank`'s piece.
  std::int64_t size(int rank) const { return end(rank) - begin(rank); }
};

}  // namespace unshard
