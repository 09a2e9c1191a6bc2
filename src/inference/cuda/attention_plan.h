#pragma once
// What of a step's attention goes to which thread block of a GPU. Plain numbers, made once a step and used by all layers; no CUDA here.
//
// A tile is some queries of one sequence that share the loads of its keys: a query is a row and one of the heads that share a KV head,
// counted row by row. One block computes one tile for one KV head over all keys that the tile sees, or, where there are too few tiles to
// fill the GPU, over one part of them; the parts are then put together by a second kernel.
#include <cstdint>
#include <span>
#include <vector>

#include "inference/kernels/attention.h"

namespace unshard::inference {

struct AttentionTileWords {
  std::int32_t row;       ///< of q and out, of the sequence's first row in this step
  std::int32_t position;  ///< of that row in its sequence
  std::int32_t first;     ///< query of the tile, counted from that row's first
  std::int32_t count;     ///< queries, at most as many as the list's tiles hold
  std::int32_t table;     ///< where the sequence's block table begins, in words
};

/// Tiles of one size, which one launch computes.
struct TileList {
  std::int64_t begin = 0;  ///< in words
  std::int64_t tiles = 0;
  std::int64_t longest_keys = 0;  ///< that a tile sees where there is no window
};

struct AttentionPlan {
  std::vector<std::int32_t> words;  ///< lists of AttentionTileWords, then block tables; a copy of it lies on the device
  TileList few, many;               ///< sequences of at most kFewQueries queries in this step, and the others
};

inline constexpr int kFewQueries = 4;
/// Queries a tile of the list `many`: what accumulators and shared memory hold.
constexpr int queries_of_many(std::int64_t head_size) { return head_size <= 128 ? 16 : 8; }
/// Heads that the kernel computes: its loads are of four features.
constexpr bool can_attend(std::int64_t head_size) { return head_size > 0 && head_size <= 256 && head_size % 4 == 0; }

/// `group`: query heads that share a KV head. Block tables are copied as far as the step reads them.
AttentionPlan plan_attention(std::span<const AttentionSpan> spans, std::int64_t group, std::int64_t head_size);

/// How the keys of one launch are cut: parts of `keys` (a multiple of 32; 0: not cut).
struct KeySplit {
  std::int32_t parts = 1, keys = 0;
};
/// `processors`: of the GPU. Enough blocks for two a processor, and no part below 256 keys.
KeySplit split_keys(const TileList& list, std::int64_t kv_heads, std::int64_t window, std::int64_t processors);

/// Floats of one tile's result over one part of the keys: values, largest score and sum of shares a query.
constexpr std::int64_t partial_floats(int queries, std::int64_t head_size) { return queries * (head_size + 2); }

/// Floats of `partials` that paged_attention() needs for a layer's call. `window`: as in its options.
std::int64_t paged_attention_floats(const AttentionPlan& plan, std::int64_t kv_heads, std::int64_t head_size, std::int64_t window,
                                    std::int64_t processors);

}  // namespace unshard::inference
