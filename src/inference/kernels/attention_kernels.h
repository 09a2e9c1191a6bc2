#pragma once
// What each instruction set supplies for attention.cc: one tile, on one thread. Plain types only (see the note in core/vec.h).
//
// [Note: a row's bits] A row's result depends on its query, its position, the window and the keys and values it sees, on nothing else: not
// on the rows computed beside it, on how its prompt was cut, nor on the number of workers. Keys are taken in chunks of kChunkKeys by their
// absolute position. Within a chunk scores are sums over features in order, probabilities are relative to the chunk's largest score and
// summed in 16 lanes, values are summed in order of keys. Chunks are merged in order by one function. What a row doesn't see but its
// neighbours do has probability 0, which changes no sum. Which worker computes a chunk, and how many rows share the load of a key, is free.
#include <cstdint>

namespace unshard::inference {

inline constexpr int kChunkBlocks = 16;
inline constexpr int kChunkKeys = 16 * kChunkBlocks;

/// Where one KV head's part of a block has what: keys [head_size][16], values [16][value_stride], for int8 then 16 scales of keys and 16 of
/// values. Bytes, but for the first two.
struct KvLayout {
  std::int64_t head_size, value_stride;  ///< features; value_stride is a multiple of 16
  std::int64_t values_at, key_scales_at, value_scales_at, head_bytes, block_bytes;
};

/// Consecutive rows of one sequence, and the query heads that share one KV head.
struct AttentionTile {
  KvLayout layout;
  const char* data;            ///< of this KV head in block 0
  const std::int32_t* blocks;  ///< of the sequence
  const float* q;              ///< first row, first head
  float* out;
  std::int64_t q_stride, out_stride, rows, group, position, window;
  std::int64_t all_seen;  ///< keys that every row sees (encoders); 0: a row sees those up to itself
  float scale, softcap;
  std::int64_t chunk_begin, chunk_end;
  float* partial;  ///< null: these are all chunks, the result goes to `out`; else chunk after chunk, partial_floats() of attention.cc each
  float* scratch;  ///< scratch_floats() of attention.cc, aligned to 64 bytes
};

/// 16 or fewer consecutive tokens of one block and KV head.
struct KvRun {
  KvLayout layout;
  char* data;  ///< of this KV head in this block
  std::int64_t slot, count;
  const float *k, *v;  ///< first token, this head
  std::int64_t stride;
};

struct AttentionKernels {
  void (*tile[3])(const AttentionTile& tile);  ///< by KvType
  void (*store[3])(const KvRun& run);
  /// out from the partial results of `chunks` chunks. Uses scratch.
  void (*merge)(const AttentionTile& tile, const float* partials, std::int64_t chunks);
};

const AttentionKernels& attention_kernels_portable();
const AttentionKernels& attention_kernels_avx2();
const AttentionKernels& attention_kernels_avx512();

}  // namespace unshard::inference
