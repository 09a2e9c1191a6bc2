#include "inference/kernels/attention.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "inference/kernels/attention_internal.h"
#include "unshard/core/error.h"

namespace unshard::inference {
namespace {

/// Rows of queries (of one KV head) a tile: widening keys costs them a few per cent, and scratch stays in the second-level cache.
constexpr std::int64_t kTileRows = 96;
/// Products of a query and a key, in features, that are worth waking another worker for: a few microseconds.
constexpr std::int64_t kGrainWork = 1 << 16;

/// A tile, or the part of it that is chunks [chunk_begin, chunk_end).
struct Item {
  AttentionTile tile;
  std::int64_t work;
};

/// Memory of one thread that grows to the largest tile it has seen.
float* scratch_of(std::int64_t floats) {
  thread_local std::vector<float> memory;
  if (static_cast<std::int64_t>(memory.size()) < floats + 16) memory.resize(static_cast<std::size_t>(floats + 16));
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
  return memory.data() + (64 - address % 64) % 64 / sizeof(float);
}

std::int64_t partial_floats(const AttentionTile& tile) { return tile.rows * tile.group * (tile.layout.value_stride + 2); }

/// As the kernels cut it up (cut_scratch() in attention_tile.inc), rounded up.
std::int64_t scratch_floats(const AttentionTile& tile) {
  constexpr std::int64_t kMaxRows = 6, kRounding = 64;
  const std::int64_t rows = tile.rows * tile.group, stride = tile.layout.value_stride;
  return partial_floats(tile) + kMaxRows * (stride + 2 + kChunkKeys) + rows * tile.layout.head_size +
         kChunkKeys * (tile.layout.head_size + stride) + kRounding;
}

/// Everything but the rows, the KV head and the chunks.
AttentionTile empty_tile(const KvLayer& layer, std::int64_t q_stride, std::int64_t heads, std::int64_t out_stride,
                         const AttentionOptions& options) {
  AttentionTile tile = {};
  tile.layout = kv_layout(layer.type, layer.kv_heads, layer.head_size);
  tile.q_stride = q_stride;
  tile.out_stride = out_stride;
  tile.group = heads / layer.kv_heads;
  tile.window = options.window;
  tile.scale = options.scale;
  tile.softcap = options.softcap;
  return tile;
}

/// One past the last key that any row sees.
std::int64_t keys_end(const AttentionTile& tile) { return tile.all_seen > 0 ? tile.all_seen : tile.position + tile.rows; }

/// Pairs of a row and a key, times heads and features.
std::int64_t work_of(const AttentionTile& tile) {
  const std::int64_t last = keys_end(tile), first = tile.chunk_begin * kChunkKeys;
  return tile.rows * tile.group * tile.layout.head_size * (last - first);
}

/// Rows a tile: as many as share loads well, fewer where workers would stay idle.
std::int64_t rows_a_tile(std::span<const AttentionSpan> spans, std::int64_t kv_heads, std::int64_t group, std::int64_t workers) {
  std::int64_t most = std::max<std::int64_t>(1, kTileRows / group);
  const auto tiles = [&] {
    std::int64_t count = 0;
    for (const AttentionSpan& span : spans) count += (span.rows + most - 1) / most * kv_heads;
    return count;
  };
  while (workers > 1 && most * group > kTileRows / 4 && tiles() < 4 * workers) most = (most + 1) / 2;
  return most;
}

std::vector<Item> tiles_of(const KvLayer& layer, std::span<const AttentionSpan> spans, const AttentionTile& empty, bool causal,
                           std::int64_t most_rows, const float* q, float* out) {
  std::vector<Item> items;
  for (const AttentionSpan& span : spans) {
    for (std::int64_t row = 0; row < span.rows; row += most_rows) {
      for (std::int64_t head = 0; head < layer.kv_heads; ++head) {
        AttentionTile tile = empty;
        const std::int64_t feature = head * tile.group * layer.head_size;
        tile.data = static_cast<const char*>(layer.data) + head * tile.layout.head_bytes;
        tile.blocks = span.blocks;
        tile.rows = std::min(most_rows, span.rows - row);
        tile.position = span.position + row;
        tile.all_seen = causal ? 0 : span.position + span.rows;
        tile.q = q + (span.first_row + row) * tile.q_stride + feature;
        tile.out = out + (span.first_row + row) * tile.out_stride + feature;
        const std::int64_t first = tile.window > 0 ? std::max<std::int64_t>(0, tile.position - tile.window + 1) : 0;
        tile.chunk_begin = first / kChunkKeys;
        tile.chunk_end = (keys_end(tile) - 1) / kChunkKeys + 1;
        items.push_back({tile, work_of(tile)});
      }
    }
  }
  return items;
}

/// Items that are too large for their share of the work, in parts by chunks; `whole` gets the tiles that must be put together afterwards.
std::vector<Item> split_items(const std::vector<Item>& items, std::int64_t workers, std::vector<AttentionTile>& whole,
                              std::vector<float>& partials) {
  std::int64_t work = 0, floats = 0;
  for (const Item& item : items) work += item.work;
  const std::int64_t share = std::max(work / (4 * workers), kGrainWork);
  const auto parts_of = [&](const Item& item) {
    if (workers == 1 || static_cast<std::int64_t>(items.size()) >= 2 * workers) return std::int64_t{1};
    return std::min((item.work + share - 1) / share, item.tile.chunk_end - item.tile.chunk_begin);
  };
  for (const Item& item : items)
    if (parts_of(item) > 1) floats += (item.tile.chunk_end - item.tile.chunk_begin) * partial_floats(item.tile);
  partials.resize(static_cast<std::size_t>(floats));
  float* partial = partials.data();
  std::vector<Item> split;
  for (const Item& item : items) {
    const std::int64_t parts = parts_of(item), begin = item.tile.chunk_begin, chunks = item.tile.chunk_end - begin;
    if (parts == 1) {
      split.push_back(item);
      continue;
    }
    whole.push_back(item.tile);
    whole.back().partial = partial;
    for (std::int64_t part = 0; part < parts; ++part) {
      Item piece = {item.tile, item.work / parts};
      piece.tile.chunk_begin = begin + chunks * part / parts;
      piece.tile.chunk_end = begin + chunks * (part + 1) / parts;
      piece.tile.partial = partial + (piece.tile.chunk_begin - begin) * partial_floats(item.tile);
      split.push_back(piece);
    }
    partial += chunks * partial_floats(item.tile);
  }
  return split;
}

/// Items one worker takes at a time.
std::int64_t grain_of(const std::vector<Item>& items) {
  std::int64_t work = 0;
  for (const Item& item : items) work += item.work;
  const auto count = static_cast<std::int64_t>(items.size());
  return std::clamp<std::int64_t>(kGrainWork * count / std::max<std::int64_t>(work, 1), 1, std::max<std::int64_t>(count, 1));
}

/// So that the last items to be handed out are small.
std::vector<std::size_t> heaviest_first(const std::vector<Item>& items) {
  std::vector<std::size_t> order(items.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return items[a].work > items[b].work; });
  return order;
}

}  // namespace

void attention_with(const AttentionKernels& kernels, std::int64_t piece_rows, const KvLayer& layer, std::span<const AttentionSpan> spans,
                    const float* q, std::int64_t q_stride, std::int64_t heads, float* out, std::int64_t out_stride,
                    const AttentionOptions& options, Workers& workers) {
  require(heads > 0 && heads % layer.kv_heads == 0, "[inference.attention] ", heads, " heads are no multiple of ", layer.kv_heads,
          " KV heads");
  require(options.causal || options.window == 0, "[inference.attention] a window of ", options.window,
          " with attention to both sides isn't built");
  const AttentionTile empty = empty_tile(layer, q_stride, heads, out_stride, options);
  const std::int64_t rows = piece_rows > 0 ? piece_rows : rows_a_tile(spans, layer.kv_heads, empty.group, workers.count());
  std::vector<AttentionTile> whole;
  std::vector<float> partials;
  auto items = split_items(tiles_of(layer, spans, empty, options.causal, rows, q, out), workers.count(), whole, partials);
  const auto order = heaviest_first(items);
  const auto compute = kernels.tile[static_cast<int>(layer.type)];
  workers.parallel_for(static_cast<std::int64_t>(items.size()), grain_of(items), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      AttentionTile& tile = items[order[static_cast<std::size_t>(i)]].tile;
      tile.scratch = scratch_of(scratch_floats(tile));
      compute(tile);
    }
  });
  workers.parallel_for(static_cast<std::int64_t>(whole.size()), 4, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      AttentionTile& tile = whole[static_cast<std::size_t>(i)];
      tile.scratch = scratch_of(scratch_floats(tile));
      kernels.merge(tile, tile.partial, tile.chunk_end - tile.chunk_begin);
    }
  });
}

void attention(const KvLayer& layer, std::span<const AttentionSpan> spans, const float* q, std::int64_t q_stride, std::int64_t heads,
               float* out, std::int64_t out_stride, const AttentionOptions& options, Workers& workers) {
  attention_with(attention_kernels(), 0, layer, spans, q, q_stride, heads, out, out_stride, options, workers);
}

}  // namespace unshard::inference
