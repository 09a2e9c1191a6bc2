#pragma once
// Casts of a parameter that autocast makes: kept as a recipe (parameter, dtype), not as bytes.
#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <unordered_set>

#include "zero/touch_target.h"

namespace unshard::zero {

struct Entry;
class DerivedCast;

/// The casts of one store's parameters that are alive.
class DerivedSet {
 public:
  void insert(DerivedCast* cast);
  void erase(DerivedCast* cast);
  /// The store gives its parameters back: every cast becomes a plain tensor. \param readable false: the values are gone.
  void detach_all(bool readable);
  std::size_t size() const;

 private:
  mutable std::mutex mutex_;
  std::unordered_set<DerivedCast*> casts_;
};

/// If autocast made `result` from the parameter, empties its storage and registers it as derived: a touch casts again. Otherwise autocast's
/// cache and the graph would hold a copy of every weight from forward to backward.
void derive_cast(Entry& source, const at::Tensor& result, const std::shared_ptr<DerivedSet>& set);

}  // namespace unshard::zero
