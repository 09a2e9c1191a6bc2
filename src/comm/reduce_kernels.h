#pragma once
// Element-wise reductions of equal arrays in the order given; the order is part of the promise (same bits on every rank).
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>

#include "unshard/comm/communicator.h"

namespace unshard::comm {

/// Whether `dtype` can be reduced with `op`: floating point and integers always, bool as max (or) and min (and).
/// Complex tensors are reduced as their real parts by the caller (sum only).
bool can_reduce(c10::ScalarType dtype, ReduceOp op);

/// output[i] = inputs[0][i] op inputs[1][i] op ... ; 16-bit floating sums are accumulated in fp32 and rounded once.
/// `output` may be one of the inputs.
void reduce_arrays(std::int64_t numel, c10::ScalarType dtype, ReduceOp op, void* output, const void* const* inputs, int count);

}  // namespace unshard::comm
