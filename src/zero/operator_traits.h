#pragma once
// What touch must know of an operator, worked out once from its schema: which arguments it reads, writes, or only looks at.
#include <cstdint>

namespace c10 {
class OperatorHandle;
}

namespace unshard::zero {

struct OperatorTraits {
  /// Reads no data of any argument itself: views, metadata, shape-only factories. Passes through.
  bool pass_through = false;
  /// Ignores the old value of what it writes (fill_, copy_, normal_): bytes need not be brought in when a whole parameter is written.
  bool overwrites = false;
  /// Makes a copy in another dtype: the result may be derived from the parameter (autocast).
  bool casts = false;
  /// Bit i: argument i is written (alias info with write). Arguments from 64 on are taken as written when any is.
  std::uint64_t writes = 0;
  /// Bit i: argument i is only viewed by the result (operators outside aten; those of aten pass through whole).
  std::uint64_t views = 0;

  bool is_written(std::size_t argument) const { return argument < 64 ? (writes >> argument) & 1 : writes != 0; }
  bool is_viewed(std::size_t argument) const { return argument < 64 && ((views >> argument) & 1); }
};

/// Lock-free after the first call for an operator.
const OperatorTraits& traits_of(const c10::OperatorHandle& op);
/// Forget an operator that is being deregistered (its schema's address may be used again).
void forget_traits(const c10::OperatorHandle& op);

}  // namespace unshard::zero
