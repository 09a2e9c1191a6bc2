#pragma once
// The update where there is no kernel of our own: torch's fused operators on other devices, plain operators for the rest.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "unshard/optim/optimizer.h"

namespace unshard {

enum class UpdateKind { adam, adamw, sgd, adagrad, lion, lamb };

/// One parameter: all flat, on one device; states fp32.
struct AtenUpdate {
  const UpdateItem* item;
  at::Tensor first, second;  ///< as in the CPU kernels; undefined where the kind has none
  std::int64_t step;         ///< from 1
  bool first_step;           ///< SGD: the momentum buffer takes the gradient as it is
};

/// Update all, which share `group`. Transient memory: the fp32 gradients of at most kAtenBatchNumel elements (or one item) at a time.
void update_with_aten(UpdateKind kind, const std::vector<AtenUpdate>& updates, const GroupOptions& group, double grad_scale);

/// fp32 weights with the user's edits of the 16-bit parameter taken over; the tensor that is updated in place.
at::Tensor refreshed_weights(const UpdateItem& item);

inline constexpr std::int64_t kAtenBatchNumel = 1 << 26;

}  // namespace unshard
