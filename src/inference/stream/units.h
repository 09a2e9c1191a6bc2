#pragma once
// What of a model is read and let go as a whole, and which of it stays in memory.
#include <cstdint>
#include <string>
#include <vector>

#include "inference/kernels/matrix_internal.h"

namespace unshard::inference {

/// A layer, or rows of the output matrix about as large. Its matrices lie one after another in one piece of memory.
struct Unit {
  struct Place {
    Matrix::Packed* matrix;
    std::int64_t offset;  ///< in the unit
  };
  std::vector<Place> places;
  std::int64_t bytes = 0;  ///< whole blocks

  /// The next matrix of the unit. \return its offset
  std::int64_t add(Matrix::Packed& matrix);
  void place(std::uint8_t* memory) const;
};

/// [Note: what stays] Units are used in one order, over and over. The budget is slots that the streamed ones pass through (one that
/// computes, the next ones on their way), and units that stay. Those are spread evenly, so that the disk reads all the time: were they
/// side by side, it would stand still while they compute, its slots full.
struct ResidencyPlan {
  std::vector<bool> stays;  ///< a unit
  std::int64_t slots = 0, slot_bytes = 0;
};
inline constexpr std::int64_t kMostSlots = 4;  ///< one that computes and three on their way

/// The units don't fit together. \throws ModelError  not even the largest fits in `budget`
ResidencyPlan plan_residency(const std::vector<std::int64_t>& unit_bytes, std::int64_t budget, const std::string& model);

}  // namespace unshard::inference
