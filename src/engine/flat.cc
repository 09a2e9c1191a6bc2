#include "flat.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>
#include <memory>

#include "unshard/core/error.h"

namespace unshard::flat {
namespace {

std::size_t bytes_of(const at::Tensor& tensor) { return static_cast<std::size_t>(tensor.numel()) * tensor.element_size(); }

// A tensor over `data` that holds `owner` alive; made without the dispatcher.
at::Tensor over(void* data, std::int64_t numel, const at::TensorOptions& options, std::shared_ptr<void> owner) {
  return at::from_blob(
      data, {numel}, [owner = std::move(owner)](void*) {}, options);
}

}  // namespace

bool is_supported(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::Float || dtype == c10::ScalarType::BFloat16 || dtype == c10::ScalarType::Half;
}

kernels::Array array(const at::Tensor& tensor) { return {tensor.data_ptr(), tensor.scalar_type()}; }

at::Tensor empty(std::int64_t numel, c10::ScalarType dtype, c10::Device device) {
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  if (!device.is_cpu()) return at::empty({numel}, options);
  auto data = std::make_shared<c10::DataPtr>(c10::GetCPUAllocator()->allocate(static_cast<std::size_t>(numel) * c10::elementSize(dtype)));
  void* address = data->get();
  return over(address, numel, options, std::move(data));
}

at::Tensor zeros(std::int64_t numel, c10::ScalarType dtype, c10::Device device) {
  auto tensor = empty(numel, dtype, device);
  fill_zero(tensor);
  return tensor;
}

at::Tensor slice(const at::Tensor& tensor, std::int64_t begin, std::int64_t numel) {
  UNSHARD_DCHECK(begin >= 0 && numel >= 0 && begin + numel <= tensor.numel(), "slice [", begin, ", +", numel, ") of ", tensor.numel());
  if (!tensor.device().is_cpu()) return tensor.narrow(0, begin, numel);
  auto* data = static_cast<std::byte*>(tensor.data_ptr()) + static_cast<std::size_t>(begin) * tensor.element_size();
  return over(data, numel, tensor.options().requires_grad(c10::nullopt), std::make_shared<at::Tensor>(tensor));
}

at::Tensor storage_view(const at::Tensor& tensor) {
  const auto whole = tensor.detach();
  return at::as_strided(whole, {whole.numel()}, {1}, whole.storage_offset());
}

void fill_zero(const at::Tensor& tensor) {
  if (!tensor.device().is_cpu()) {
    tensor.zero_();
  } else if (tensor.numel() > 0) {
    std::memset(tensor.data_ptr(), 0, bytes_of(tensor));
  }
}

void copy(const at::Tensor& destination, const at::Tensor& source, double scale) {
  UNSHARD_DCHECK(destination.numel() == source.numel(), destination.numel(), " <- ", source.numel());
  if (destination.numel() == 0) return;
  // Frozen parameters may be of any type; the passes know the floating-point ones that are trained.
  const auto known = [](const at::Tensor& t) {
    const auto dtype = t.scalar_type();
    return t.device().is_cpu() && (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf);
  };
  if (known(destination) && known(source)) {
    kernels::copy(source.numel(), array(destination), array(source), scale);
  } else {
    destination.copy_(scale == 1 ? source : source.mul(scale));
  }
}

void accumulate(const at::Tensor& accumulator, const std::vector<at::Tensor>& inputs, bool first) {
  if (accumulator.numel() == 0) return;
  if (!accumulator.device().is_cpu()) {
    auto sum = first ? at::zeros(accumulator.sizes(), accumulator.options().dtype(at::kFloat)) : accumulator.to(at::kFloat);
    for (const auto& input : inputs) sum.add_(input);
    accumulator.copy_(sum);
    return;
  }
  std::vector<kernels::Array> arrays;
  arrays.reserve(inputs.size());
  for (const auto& input : inputs) arrays.push_back(array(input));
  kernels::accumulate(accumulator.numel(), array(accumulator), arrays.data(), static_cast<int>(arrays.size()), first);
}

kernels::Squares sum_of_squares(const at::Tensor& values) {
  if (values.numel() == 0) return {};
  if (values.device().is_cpu()) return kernels::sum_of_squares(values.numel(), array(values));
  const auto wide = values.to(at::kDouble);
  return {wide.mul(wide).sum().item<double>(), at::isfinite(values).all().item<bool>()};
}

}  // namespace unshard::flat
