#pragma once
// Shared by kv_store.cc, attention.cc and their tests.
#include <vector>

#include "inference/kernels/attention.h"
#include "inference/kernels/attention_kernels.h"

namespace unshard::inference {

/// Of the instruction set that this process uses.
const AttentionKernels& attention_kernels();
KvLayout kv_layout(KvType type, std::int64_t kv_heads, std::int64_t head_size);

/// attention() with kernels of choice. Splits tiles along their keys where there are too few for all workers, and into pieces of
/// `piece_rows` rows at most (0: as suits the workers); neither changes a bit.
void attention_with(const AttentionKernels& kernels, std::int64_t piece_rows, const KvLayer& layer, std::span<const AttentionSpan> spans,
                    const float* q, std::int64_t q_stride, std::int64_t heads, float* out, std::int64_t out_stride,
                    const AttentionOptions& options, Workers& workers);

}  // namespace unshard::inference
