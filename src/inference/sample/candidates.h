#pragma once
// The tokens that may still be drawn, and the cuts that leave the best of them.
#include <cstdint>
#include <limits>
#include <vector>

#include "inference/sample/sample_kernels.h"

namespace unshard::inference {

/// Tokens with their logits and weights (exp((logit - largest) * scale)). "Best" is: the larger logit first, then the lower id.
class Candidates {
 public:
  Candidates(const SampleKernels& kernels, std::int64_t vocab);

  /// All of x[n] >= threshold, with weights. \param maxima  of SampleKernels::scan
  void gather(const float* x, std::int64_t n, const float* maxima, float threshold, float largest, float scale);
  /// All that can be among the k best: perhaps more than k, seldom many more. Without weights if `scale` is 0.
  void gather_best(const float* x, std::int64_t n, const float* maxima, std::int64_t k, float largest, float scale);
  /// Leave the k best.
  void keep_count(std::int64_t k);
  /// Leave the fewest best whose weights sum up to `mass`: one at least, all if they don't reach it.
  void keep_mass(double mass);
  /// Leave logits >= threshold.
  void keep_at_least(float threshold);
  void sort();

  std::int64_t count() const { return count_; }
  std::int32_t id(std::int64_t i) const { return ids_[static_cast<std::size_t>(i)]; }
  float value(std::int64_t i) const { return values_[static_cast<std::size_t>(i)]; }
  double mass() const;
  /// The token at which the running sum of weights exceeds u times their sum. \param u  [0, 1)
  std::int32_t draw(double u);

 private:
  struct Item {
    float value;
    std::int32_t id;
    float weight;
  };
  static bool better(const Item& a, const Item& b) { return a.value != b.value ? a.value > b.value : a.id < b.id; }
  Item item(std::int64_t i) const;
  void put(std::int64_t i, const Item& item);
  /// Logits in [low, high): the best end in there. Those >= high are `sure` and don't reach the target; those >= low do.
  struct Bracket {
    float low = -std::numeric_limits<float>::infinity(), high = std::numeric_limits<float>::infinity();
    std::int64_t at_low = 0;
    Above sure{0, 0};
  };
  template <class Reached>
  bool bracket(Reached reached, Bracket& bracket) const;
  template <class Reached>
  void keep_best(Reached reached);

  const SampleKernels& kernels_;
  std::int64_t count_ = 0;
  float largest_ = 0;
  std::vector<std::int32_t> ids_;  ///< [vocab + 16], as values_ and weights_; the first count_ count
  std::vector<float> values_, weights_;
  std::vector<Item> items_;           ///< scratch
  std::vector<double> sums_;          ///< scratch
  std::vector<std::int32_t> middle_;  ///< scratch [vocab + 16]
  std::vector<float> order_;          ///< scratch
};

}  // namespace unshard::inference
