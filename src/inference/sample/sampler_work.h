#pragma once
// The parts of a choice that read or change a SamplerState.
#include "inference/sample/sampler.h"

namespace unshard::inference {

struct SamplerWork {
  /// Logit bias, then repetition, frequency and presence penalty, in place. Cost: O(biased + distinct tokens so far), nothing without them.
  static void adjust(const SamplerState& state, std::span<float> logits);
  /// The uniform number of this draw.
  static double uniform(const SamplerState& state);
  /// One more token of the sequence.
  static void remember(SamplerState& state, Token token);
};

}  // namespace unshard::inference
