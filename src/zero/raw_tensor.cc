#include "zero/raw_tensor.h"

#include <c10/core/StorageImpl.h>

namespace unshard::zero {
namespace {

at::Tensor over_storage(c10::Storage storage, std::int64_t offset, std::int64_t numel, c10::ScalarType dtype) {
  const c10::DispatchKeySet keys(c10::computeDispatchKey(dtype, c10::kStrided, storage.device()));
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(c10::IntArrayRef{numel}, c10::IntArrayRef{1}, offset);
  return tensor;
}

constexpr c10::DispatchKeySet observers() {
  using K = c10::DispatchKey;
  return c10::DispatchKeySet({K::Python, K::PythonTLSSnapshot, K::PythonDispatcher, K::PreDispatch, K::FuncTorchDynamicLayerFrontMode,
                              K::FuncTorchDynamicLayerBackMode, K::Functionalize, K::Tracer, K::DeferredInit, K::CustomRNGKeyId,
                              K::ADInplaceOrView}) |
         c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset;
}

}  // namespace

at::Tensor tensor_over(void* data, std::int64_t numel, c10::ScalarType dtype, c10::Device device, std::shared_ptr<const void> owner) {
  const std::size_t bytes = static_cast<std::size_t>(numel) * c10::elementSize(dtype);
  c10::DataPtr pointer(
      data, new std::shared_ptr<const void>(std::move(owner)),
      [](void* context) { delete static_cast<std::shared_ptr<const void>*>(context); }, device);
  auto storage =
      c10::make_storage_impl(c10::StorageImpl::use_byte_size_t(), c10::SymInt(static_cast<std::int64_t>(bytes)), std::move(pointer),
                             /*allocator=*/nullptr, /*resizable=*/false, device);
  return over_storage(c10::Storage(std::move(storage)), 0, numel, dtype);
}

at::Tensor flat_view(const at::Tensor& tensor, std::int64_t begin, std::int64_t numel) {
  auto* impl = tensor.unsafeGetTensorImpl();
  return over_storage(impl->unsafe_storage(), tensor.storage_offset() + begin, numel, tensor.scalar_type());
}

Unobserved::Unobserved() : guard_(observers()) {}

}  // namespace unshard::zero
