#pragma once
// Attention over the paged KV cache: prefill and decode rows alike, grouped heads, in one call a layer.
#include <cstdint>
#include <memory>
#include <span>

#include "inference/kernels/workers.h"

namespace unshard::inference {

inline constexpr std::int64_t kBlockTokens = 16;  ///< tokens a KV block: one vector of keys

enum class KvType { f32, bf16, int8 };

/// The cache of one layer. Each block holds kBlockTokens keys and values of every KV head; how, is the kernels' affair (keys lie
/// transposed, so that a vector holds one feature of 16 keys).
struct KvLayer {
  void* data = nullptr;  ///< [blocks] of kv_block_bytes()
  KvType type = KvType::bf16;
  std::int64_t kv_heads = 0, head_size = 0;
};

/// Bytes of one block of one layer: keys, values and, for int8, a scale a key and value.
std::int64_t kv_block_bytes(KvType type, std::int64_t kv_heads, std::int64_t head_size);

/// Consecutive tokens of one sequence in this step.
struct AttentionSpan {
  std::int64_t first_row = 0, rows = 0;  ///< of q, k, v, out
  std::int64_t position = 0;             ///< of the first row in its sequence; what lies before is in the cache
  const std::int32_t* blocks = nullptr;  ///< the sequence's block table, [ceil((position + rows) / kBlockTokens)]
};

/// Store keys and values of this step's rows. k, v: [rows, kv_heads * head_size], rows `stride` apart.
void kv_store(const KvLayer& layer, std::span<const AttentionSpan> spans, const float* k, const float* v, std::int64_t stride,
              Workers& workers);

struct AttentionOptions {
  float scale = 0;          ///< of the scores: 1 / sqrt(head_size)
  std::int64_t window = 0;  ///< a row sees this many last tokens, itself included; 0: all
  float softcap = 0;        ///< scores become cap * tanh(score / cap); 0: as they are
  bool causal = true;       ///< else each row sees its sequence up to the span's last row, as encoders do; without a window
};

/// out[rows, heads * head_size] = softmax(q K^T) V; rows of this step must have been stored.
void attention(const KvLayer& layer, std::span<const AttentionSpan> spans, const float* q, std::int64_t q_stride, std::int64_t heads,
               float* out, std::int64_t out_stride, const AttentionOptions& options, Workers& workers);

/// Copy block `from` to `to` (copy on write).
void kv_copy_block(const KvLayer& layer, std::int32_t from, std::int32_t to);

}  // namespace unshard::inference
