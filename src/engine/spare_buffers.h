#pragma once
// Buckets' memory, used again: what the system hands out anew costs a page fault for each 4 KB, in a virtual machine a microsecond or two.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <mutex>
#include <vector>

namespace unshard {

/// Any thread.
class SpareBuffers {
 public:
  /// \param most_bytes  kept at most; what is given back beyond that is freed
  explicit SpareBuffers(std::int64_t most_bytes) : most_bytes_(most_bytes) {}
  /// A flat tensor of unknown values: one that was given back, or a new one.
  at::Tensor take(std::int64_t numel, c10::ScalarType dtype, c10::Device device);
  /// Kept if nobody else holds it (its slices do). Only CPU memory: other devices' allocators keep theirs by themselves.
  void give_back(at::Tensor&& tensor);
  std::int64_t bytes() const;

 private:
  mutable std::mutex mutex_;
  std::vector<at::Tensor> spare_;
  const std::int64_t most_bytes_;
  std::int64_t bytes_ = 0;
};

}  // namespace unshard
