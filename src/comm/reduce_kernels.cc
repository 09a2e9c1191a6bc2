#include "comm/reduce_kernels.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>
#include <vector>

#include "unshard/core/error.h"
#include "unshard/core/flat_math.h"

namespace unshard::comm {

namespace {

constexpr std::int64_t kBlock = 1024;  // elements accumulated in a local array before they are stored (rounded once)

template <class Acc>
Acc combine(ReduceOp op, Acc a, Acc b) {
  if constexpr (std::is_floating_point_v<Acc>) {
    if (op != ReduceOp::sum && std::isnan(b)) return b;  // NaN wins, as in torch
    if (op != ReduceOp::sum && std::isnan(a)) return a;
  }
  if (op == ReduceOp::max) return std::max(a, b);
  return std::min(a, b);
}

template <class T, class Acc>
void reduce_block(std::int64_t numel, ReduceOp op, T* output, const T* const* inputs, int count) {
  std::array<Acc, kBlock> sum;
  for (std::int64_t i = 0; i < numel; ++i) sum[i] = static_cast<Acc>(inputs[0][i]);
  for (int r = 1; r < count; ++r) {
    const T* in = inputs[r];
    if (op == ReduceOp::sum) {
      for (std::int64_t i = 0; i < numel; ++i) sum[i] += static_cast<Acc>(in[i]);
    } else {
      for (std::int64_t i = 0; i < numel; ++i) sum[i] = combine<Acc>(op, sum[i], static_cast<Acc>(in[i]));
    }
  }
  for (std::int64_t i = 0; i < numel; ++i) output[i] = static_cast<T>(sum[i]);
}

template <class T, class Acc = T>
void reduce_typed(std::int64_t numel, ReduceOp op, void* output, const void* const* inputs, int count) {
  std::vector<const T*> at(static_cast<std::size_t>(count));
  for (std::int64_t begin = 0; begin < numel; begin += kBlock) {
    for (int r = 0; r < count; ++r) at[static_cast<std::size_t>(r)] = static_cast<const T*>(inputs[r]) + begin;
    reduce_block<T, Acc>(std::min(kBlock, numel - begin), op, static_cast<T*>(output) + begin, at.data(), count);
  }
}

// kernels::accumulate covers the dtypes that training reduces, vectorised.
bool sum_fast(std::int64_t numel, c10::ScalarType dtype, void* output, const void* const* inputs, int count) {
  if (dtype != c10::ScalarType::Float && dtype != c10::ScalarType::BFloat16 && dtype != c10::ScalarType::Half) return false;
  std::array<kernels::Array, 64> arrays;
  if (count > static_cast<int>(arrays.size())) return false;
  for (int r = 0; r < count; ++r) arrays[static_cast<std::size_t>(r)] = {const_cast<void*>(inputs[r]), dtype};
  kernels::accumulate(numel, {output, dtype}, arrays.data(), count, true);
  return true;
}

}  // namespace

bool can_reduce(c10::ScalarType dtype, ReduceOp op) {
  switch (dtype) {
    case c10::ScalarType::Float:
    case c10::ScalarType::Double:
    case c10::ScalarType::Half:
    case c10::ScalarType::BFloat16:
    case c10::ScalarType::Char:
    case c10::ScalarType::Byte:
    case c10::ScalarType::Short:
    case c10::ScalarType::Int:
    case c10::ScalarType::Long:
      return true;
    case c10::ScalarType::Bool:
      return op != ReduceOp::sum;
    default:
      return false;
  }
}

void reduce_arrays(std::int64_t numel, c10::ScalarType dtype, ReduceOp op, void* output, const void* const* inputs, int count) {
  UNSHARD_DCHECK(can_reduce(dtype, op), "dtype ", c10::toString(dtype));
  if (op == ReduceOp::sum && sum_fast(numel, dtype, output, inputs, count)) return;
  switch (dtype) {
    case c10::ScalarType::Float:
      return reduce_typed<float>(numel, op, output, inputs, count);
    case c10::ScalarType::Double:
      return reduce_typed<double>(numel, op, output, inputs, count);
    case c10::ScalarType::Half:
      return reduce_typed<c10::Half, float>(numel, op, output, inputs, count);
    case c10::ScalarType::BFloat16:
      return reduce_typed<c10::BFloat16, float>(numel, op, output, inputs, count);
    case c10::ScalarType::Char:
      return reduce_typed<std::int8_t>(numel, op, output, inputs, count);
    case c10::ScalarType::Bool:
    case c10::ScalarType::Byte:
      return reduce_typed<std::uint8_t>(numel, op, output, inputs, count);
    case c10::ScalarType::Short:
      return reduce_typed<std::int16_t>(numel, op, output, inputs, count);
    case c10::ScalarType::Int:
      return reduce_typed<std::int32_t>(numel, op, output, inputs, count);
    case c10::ScalarType::Long:
      return reduce_typed<std::int64_t>(numel, op, output, inputs, count);
    default:
      UNSHARD_DCHECK(false, "dtype ", c10::toString(dtype));
  }
}

}  // namespace unshard::comm
