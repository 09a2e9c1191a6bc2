#pragma once
// Passes over flat tensors: the kernels of core/flat_math.h on CPU memory, ATen's operators on other devices. All tensors are 1-D and
// contiguous. The CPU paths never enter the dispatcher, so that modes of the user (tracers, fake tensors) don't see them.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "unshard/core/flat_math.h"

namespace unshard::flat {

/// dtypes that gradients, masters and buckets may have.
bool is_supported(c10::ScalarType dtype);
kernels::Array array(const at::Tensor& tensor);
/// A new zeroed 1-D tensor.
at::Tensor zeros(std::int64_t numel, c10::ScalarType dtype, c10::Device device);
at::Tensor empty(std::int64_t numel, c10::ScalarType dtype, c10::Device device);
/// Elements [begin, begin + numel) of `tensor`, aliasing it (the result keeps the memory alive).
at::Tensor slice(const at::Tensor& tensor, std::int64_t begin, std::int64_t numel);
/// All elements of a non-overlapping dense tensor in storage order, aliasing its memory.
at::Tensor storage_view(const at::Tensor& tensor);

void fill_zero(const at::Tensor& tensor);
/// destination = source * scale, converted; equal numel.
void copy(const at::Tensor& destination, const at::Tensor& source, double scale = 1);
/// accumulator = (first ? 0 : accumulator) + inputs[0] + inputs[1] + ...
void accumulate(const at::Tensor& accumulator, const std::vector<at::Tensor>& inputs, bool first);
kernels::Squares sum_of_squares(const at::Tensor& values);

}  // namespace unshard::flat
