#include <algorithm>
#include <cstring>

#include "core/cpu_isa.h"
#include "inference/kernels/attention_internal.h"
#include "unshard/core/error.h"

namespace unshard::inference {
namespace {

std::int64_t value_bytes(KvType type) { return type == KvType::f32 ? 4 : type == KvType::bf16 ? 2 : 1; }

/// Tokens of a step that lie in one block.
struct Run {
  std::int64_t row, block, slot, count;
};

std::vector<Run> runs_of(std::span<const AttentionSpan> spans) {
  std::vector<Run> runs;
  for (const AttentionSpan& span : spans) {
    for (std::int64_t row = 0; row < span.rows;) {
      const std::int64_t position = span.position + row, slot = position % kBlockTokens;
      const std::int64_t count = std::min(kBlockTokens - slot, span.rows - row);
      runs.push_back({span.first_row + row, span.blocks[position / kBlockTokens], slot, count});
      row += count;
    }
  }
  return runs;
}

}  // namespace

const AttentionKernels& attention_kernels() {
  return kernels::select_table(attention_kernels_portable, attention_kernels_avx2, attention_kernels_avx512);
}

KvLayout kv_layout(KvType type, std::int64_t kv_heads, std::int64_t head_size) {
  require(kv_heads > 0 && head_size > 0, "[inference.attention] ", kv_heads, " KV heads of ", head_size,
          " features; both must be positive");
  const std::int64_t width = value_bytes(type), scales = type == KvType::int8 ? 16 * 4 : 0;
  KvLayout layout = {};
  layout.head_size = head_size;
  layout.value_stride = (head_size + 15) / 16 * 16;
  layout.values_at = head_size * 16 * width;
  layout.key_scales_at = layout.values_at + layout.value_stride * 16 * width;
  layout.value_scales_at = layout.key_scales_at + scales;
  layout.head_bytes = layout.value_scales_at + scales;
  layout.block_bytes = kv_heads * layout.head_bytes;
  return layout;
}

std::int64_t kv_block_bytes(KvType type, std::int64_t kv_heads, std::int64_t head_size) {
  return kv_layout(type, kv_heads, head_size).block_bytes;
}

void kv_store(const KvLayer& layer, std::span<const AttentionSpan> spans, const float* k, const float* v, std::int64_t stride,
              Workers& workers) {
  constexpr std::int64_t kGrain = 16;  // runs of one head that are worth waking another worker for
  const KvLayout layout = kv_layout(layer.type, layer.kv_heads, layer.head_size);
  const auto store = attention_kernels().store[static_cast<int>(layer.type)];
  const std::vector<Run> runs = runs_of(spans);
  workers.parallel_for(static_cast<std::int64_t>(runs.size()), std::max<std::int64_t>(1, kGrain / layer.kv_heads),
                       [&](std::int64_t begin, std::int64_t end) {
                         for (std::int64_t i = begin * layer.kv_heads; i < end * layer.kv_heads; ++i) {
                           const Run& run = runs[static_cast<std::size_t>(i / layer.kv_heads)];
                           const std::int64_t head = i % layer.kv_heads, at = run.row * stride + head * layer.head_size;
                           char* data = static_cast<char*>(layer.data) + run.block * layout.block_bytes + head * layout.head_bytes;
                           store({layout, data, run.slot, run.count, k + at, v + at, stride});
                         }
                       });
}

void kv_copy_block(const KvLayer& layer, std::int32_t from, std::int32_t to) {
  const std::int64_t bytes = kv_block_bytes(layer.type, layer.kv_heads, layer.head_size);
  char* data = static_cast<char*>(layer.data);
  std::memcpy(data + to * bytes, data + from * bytes, static_cast<std::size_t>(bytes));
}

}  // namespace unshard::inference
