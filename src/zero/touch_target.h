#pragma once
// What a storage with the touch keys leads to: a partitioned parameter, or a cast derived from one.
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>

namespace at {
class Tensor;
}

namespace unshard::zero {

enum class Access : std::uint8_t {
  read,
  write,      ///< the old value matters (mul_)
  overwrite,  ///< every element is replaced and none is read (zero_)
};

/// What a pin did that undoing or finishing must know.
struct Pinned {
  bool fresh_copy = false;      ///< an overwrite works on a copy without the old value: if the operator throws, the copy must go
  bool lockstep_write = false;  ///< finish() sends the own slice to its resting place
};

// [Note: a storage leads to its target] A storage whose parameter we own carries the target as its allocator. Unlike its DataPtr, the
// allocator never changes while the target lives, so that any thread finds the target with two loads and no lock; torch itself uses it
// only to grow a storage, which we forbid (not resizable). The address that raw_deleter() returns says "ours".
class TouchTarget : public at::Allocator {
 public:
  /// Make the bytes readable below the dispatcher until unpin. Blocks while they are brought in.
  virtual Pinned pin(Access access) = 0;
  /// After the operator succeeded on a lockstep write, before unpin. Waits for the other ranks; may throw.
  virtual void finish_lockstep_write() = 0;
  virtual void unpin(bool abandon) noexcept = 0;
  /// The target dies with its storage, which the caller must keep until unpin.
  virtual bool lives_in_storage() const = 0;
  /// `result` is this parameter in another dtype, made by one operator: it may be kept as a recipe instead of as bytes.
  virtual void derive(const at::Tensor& result) {}
  /// The tensor shows the whole value in its own order (not transposed, not a part).
  virtual bool is_exactly(const at::Tensor& tensor) const { return false; }
  /// Elements of the whole value.
  virtual std::int64_t whole_numel() const = 0;

  at::DataPtr allocate(std::size_t bytes) override { return original_allocator->allocate(bytes); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { original_allocator->copy_data(to, from, bytes); }
  at::DeleterFnPtr raw_deleter() const override { return &tag; }

  static void tag(void* pointer);
  at::Allocator* original_allocator = nullptr;
};

/// The target behind a storage, or nullptr: plain storage.
inline TouchTarget* target_of(c10::StorageImpl& storage) {
  at::Allocator* allocator = storage.allocator();
  if (!allocator || allocator->raw_deleter() != &TouchTarget::tag) return nullptr;
  return static_cast<TouchTarget*>(allocator);
}

}  // namespace unshard::zero
