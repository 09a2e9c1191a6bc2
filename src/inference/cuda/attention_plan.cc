#include "inference/cuda/attention_plan.h"

#include <algorithm>
#include <cstring>

namespace unshard::inference {
namespace {

constexpr std::int64_t kTileWords = sizeof(AttentionTileWords) / sizeof(std::int32_t);

std::int64_t blocks_of(const AttentionSpan& span) { return (span.position + span.rows + kBlockTokens - 1) / kBlockTokens; }

void add_tiles(const AttentionSpan& span, std::int64_t group, int queries, std::int64_t table, TileList& list,
               std::vector<AttentionTileWords>& tiles) {
  for (std::int64_t first = 0; first < span.rows * group; first += queries) {
    const auto count = std::min<std::int64_t>(queries, span.rows * group - first);
    tiles.push_back({static_cast<std::int32_t>(span.first_row), static_cast<std::int32_t>(span.position), static_cast<std::int32_t>(first),
                     static_cast<std::int32_t>(count), static_cast<std::int32_t>(table)});
    ++list.tiles;
  }
  list.longest_keys = std::max(list.longest_keys, span.position + span.rows);
}

}  // namespace

AttentionPlan plan_attention(std::span<const AttentionSpan> spans, std::int64_t group, std::int64_t head_size) {
  AttentionPlan plan;
  std::vector<std::int32_t> tables;
  std::vector<AttentionTileWords> tiles;
  for (const bool few : {true, false}) {
    TileList& list = few ? plan.few : plan.many;
    list.begin = static_cast<std::int64_t>(tiles.size()) * kTileWords;
    for (const auto& span : spans) {
      if ((span.rows * group <= kFewQueries) != few) continue;
      add_tiles(span, group, few ? kFewQueries : queries_of_many(head_size), static_cast<std::int64_t>(tables.size()), list, tiles);
      tables.insert(tables.end(), span.blocks, span.blocks + blocks_of(span));
    }
  }
  const auto head = static_cast<std::int64_t>(tiles.size()) * kTileWords;
  for (auto& tile : tiles) tile.table += static_cast<std::int32_t>(head);
  plan.words.resize(static_cast<std::size_t>(head));
  if (head > 0) std::memcpy(plan.words.data(), tiles.data(), plan.words.size() * sizeof(std::int32_t));
  plan.words.insert(plan.words.end(), tables.begin(), tables.end());
  return plan;
}

KeySplit split_keys(const TileList& list, std::int64_t kv_heads, std::int64_t window, std::int64_t processors) {
  constexpr std::int64_t kStep = 32, kLeastKeys = 256;
  // Each row of a tile moves its window on by one.
  const auto keys = window > 0 ? std::min(list.longest_keys, window + queries_of_many(0)) : list.longest_keys;
  const auto blocks = list.tiles * kv_heads, wanted = 2 * processors;
  if (blocks == 0 || blocks >= wanted || keys <= kLeastKeys) return {};
  const auto most = (keys + kLeastKeys - 1) / kLeastKeys;
  const auto parts = std::min(most, (wanted + blocks - 1) / blocks);
  const auto each = ((keys + parts - 1) / parts + kStep - 1) / kStep * kStep;
  return {static_cast<std::int32_t>((keys + each - 1) / each), static_cast<std::int32_t>(each)};
}

std::int64_t paged_attention_floats(const AttentionPlan& plan, std::int64_t kv_heads, std::int64_t head_size, std::int64_t window,
                                    std::int64_t processors) {
  const auto of = [&](const TileList& list, int queries) {
    const auto parts = split_keys(list, kv_heads, window, processors).parts;
    return parts == 1 ? 0 : list.tiles * kv_heads * parts * partial_floats(queries, head_size);
  };
  return std::max(of(plan.few, kFewQueries), of(plan.many, queries_of_many(head_size)));
}

}  // namespace unshard::inference
