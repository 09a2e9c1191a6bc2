#pragma once
// Find the element at which a running sum of weights exceeds a share of the whole, in two levels: sums of chunks, then weights in one.
#include <algorithm>
#include <numeric>
#include <span>

namespace unshard::inference {

struct ChunkShare {
  std::size_t chunk = 0;
  double share = 0;  ///< of the chunk's sum, in [0, 1): a share, as another order of adding gives another sum
};

/// \param u  [0, 1). Chunks of sum 0 are never chosen.
inline ChunkShare pick_chunk(std::span<const double> sums, double u) {
  double rest = u * std::accumulate(sums.begin(), sums.end(), 0.0);
  ChunkShare last;
  for (std::size_t c = 0; c < sums.size(); ++c) {
    if (sums[c] <= 0) continue;
    if (rest < sums[c]) return {c, rest / sums[c]};
    rest -= sums[c];
    last = {c, 1};  // rounding may carry u over the end
  }
  return last;
}

/// Weights of 0 are never chosen.
inline std::size_t pick_element(std::span<const float> weights, double share) {
  const double target = share * std::accumulate(weights.begin(), weights.end(), 0.0);
  double sum = 0;
  std::size_t last = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] == 0) continue;
    last = i;
    if ((sum += weights[i]) > target) break;
  }
  return last;
}

}  // namespace unshard::inference
