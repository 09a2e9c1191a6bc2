#pragma once
// LAMB: Adam's direction with weight decay, scaled for each parameter by the ratio of its weights' norm to that direction's.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "unshard/optim/optimizer.h"

namespace unshard {

/// One parameter's piece; states fp32, like the item's pieces.
struct LambUpdate {
  const UpdateItem* item;
  at::Tensor exp_avg, exp_avg_sq;
  std::int64_t step;  ///< from 1
};

/// Update all. Two passes over the pieces, and between them one sum over the ranks of two numbers a parameter. Transient memory: some
/// kLambChunk elements, where a piece lies on a CPU; a few times the largest piece elsewhere.
/// \return  the coefficient of each update, in order: clamp(|weights| / |direction|, min_coeff, max_coeff), 1 where a norm is 0
std::vector<double> update_with_lamb(const std::vector<LambUpdate>& updates, const std::vector<GroupOptions>& groups,
                                     const UpdateScale& scale);

inline constexpr std::int64_t kLambChunk = 1 << 15;  ///< fp32 of it and of its temporaries stay in a core's cache

}  // namespace unshard
