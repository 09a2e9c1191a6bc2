#pragma once
// Tensor parallelism: ranks that compute one model together, each with a part of every matrix. Source: Megatron-LM (arXiv 1909.08053):
// heads and MLP features are cut, so that a layer needs two sums over ranks.
#include <algorithm>
#include <cstdint>
#include <vector>

namespace unshard::inference {

/// What the ranks of one model say to each other. All calls are collective, in the same order on all ranks.
class Peers {
 public:
  virtual ~Peers() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual void all_reduce(float* values, std::int64_t count) = 0;  ///< sums, in rank order
  virtual void broadcast(std::vector<std::int32_t>& words) = 0;    ///< rank 0's; others' are resized
  /// Not collective: the others' calls throw from now on.
  virtual void fail(const char* reason) noexcept = 0;
};

struct Range {
  std::int64_t begin = 0, end = 0;
  std::int64_t size() const { return end - begin; }
};

struct Shard {
  int rank = 0, size = 1;
  /// This rank's part of [0, n), in whole units as evenly as they go; it may be empty.
  Range of(std::int64_t n, std::int64_t unit = 1) const {
    const std::int64_t units = (n + unit - 1) / unit;
    return {std::min(n, units * rank / size * unit), std::min(n, units * (rank + 1) / size * unit)};
  }
};

}  // namespace unshard::inference
