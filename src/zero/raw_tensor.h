#pragma once
// Plain tensors made without the dispatcher, so that no mode, tracer or autograd sees them, and the guard for work that must use it.
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>

namespace unshard::zero {

/// Flat tensor over memory that `owner` keeps alive.
at::Tensor tensor_over(void* data, std::int64_t numel, c10::ScalarType dtype, c10::Device device, std::shared_ptr<const void> owner);
/// Flat view of `numel` elements from `begin` (elements, in storage order, from the tensor's first), on the same storage.
at::Tensor flat_view(const at::Tensor& tensor, std::int64_t begin, std::int64_t numel);

/// Hides what is done inside from modes, tracers, autocast, autograd, functorch and from touch itself.
class Unobserved {
 public:
  Unobserved();

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

}  // namespace unshard::zero
