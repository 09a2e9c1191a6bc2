#pragma once
// Random cases of paged attention, and what the portable CPU kernel makes of them: for the tests on a GPU and in its place.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "inference/cuda/paged_attention.h"
#include "inference/kernels/attention_internal.h"
#include "inference/weights/half.h"

namespace unshard::inference::testing {

struct AttentionCase {
  CudaKvType type = CudaKvType::bf16;
  std::int64_t kv_heads = 1, group = 1, head_size = 64, processors = 1, rows = 0;
  AttentionOptions options;
  std::vector<std::vector<std::int32_t>> tables;
  std::vector<AttentionSpan> spans;
  std::vector<std::byte> keys, values;  ///< [blocks, kBlockTokens, kv_heads, head_size], NaN where nothing was stored
  std::vector<float> q, wanted;         ///< [rows, kv_heads * group * head_size]

  std::int64_t width() const { return kv_heads * group * head_size; }
  std::string name() const {
    std::string text = "type " + std::to_string(static_cast<int>(type)) + " kv_heads " + std::to_string(kv_heads) + " group " +
                       std::to_string(group) + " head_size " + std::to_string(head_size) + " window " + std::to_string(options.window) +
                       " softcap " + std::to_string(options.softcap) + " processors " + std::to_string(processors) + " spans";
    for (const auto& span : spans) text += " " + std::to_string(span.position) + "+" + std::to_string(span.rows);
    return text;
  }
  /// The largest difference to what the CPU computes; NaN where one is.
  float error(const std::vector<float>& out) const {
    float worst = 0;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const float error = std::abs(out[i] - wanted[i]);
      worst = error <= worst ? worst : error;
    }
    return worst;
  }
};

/// As the cache will hold it.
inline float rounded(float x, CudaKvType type) {
  return type == CudaKvType::f32 ? x : type == CudaKvType::bf16 ? float_of_bf16(bf16_of_float(x)) : float_of_f16(f16_of_float(x));
}
inline void put(std::vector<std::byte>& cache, std::int64_t at, float x, CudaKvType type) {
  const std::uint16_t half = type == CudaKvType::bf16 ? bf16_of_float(x) : f16_of_float(x);
  if (type == CudaKvType::f32)
    std::memcpy(cache.data() + at * 4, &x, 4);
  else
    std::memcpy(cache.data() + at * 2, &half, 2);
}

/// Fill caches, queries and wanted results for spans of (position, rows). Scores reach about `scale_up` times 4.
inline void fill_case(AttentionCase& made, const std::vector<std::pair<std::int64_t, std::int64_t>>& spans, float scale_up,
                      std::mt19937& random) {
  std::normal_distribution<float> normal;
  Workers workers(1);
  const std::int64_t kv_width = made.kv_heads * made.head_size;
  std::int64_t blocks = 3;
  for (const auto& [position, rows] : spans) blocks += (position + rows + kBlockTokens - 1) / kBlockTokens;
  std::vector<std::int32_t> free(static_cast<std::size_t>(blocks));
  std::iota(free.begin(), free.end(), 0);
  std::shuffle(free.begin(), free.end(), random);
  const std::size_t bytes = static_cast<std::size_t>(blocks * kBlockTokens * kv_width) * (made.type == CudaKvType::f32 ? 4 : 2);
  made.keys.assign(bytes, std::byte{0xff});
  made.values.assign(bytes, std::byte{0xff});
  std::vector<float> memory(static_cast<std::size_t>(blocks * kv_block_bytes(KvType::f32, made.kv_heads, made.head_size) / 4));
  const KvLayer layer = {memory.data(), KvType::f32, made.kv_heads, made.head_size};
  for (const auto& [position, rows] : spans) {
    auto& table = made.tables.emplace_back();
    for (std::int64_t b = 0; b * kBlockTokens < position + rows; ++b) table.push_back(free.back()), free.pop_back();
    std::vector<float> k(static_cast<std::size_t>((position + rows) * kv_width)), v(k.size());
    for (std::size_t i = 0; i < k.size(); ++i) {
      k[i] = rounded(normal(random), made.type), v[i] = rounded(normal(random), made.type);
      const auto token = static_cast<std::int64_t>(i) / kv_width, feature = static_cast<std::int64_t>(i) % kv_width;
      const auto slot = table[static_cast<std::size_t>(token / kBlockTokens)] * kBlockTokens + token % kBlockTokens;
      put(made.keys, slot * kv_width + feature, k[i], made.type);
      put(made.values, slot * kv_width + feature, v[i], made.type);
    }
    const AttentionSpan all = {0, position + rows, 0, table.data()};
    kv_store(layer, {&all, 1}, k.data(), v.data(), kv_width, workers);
    made.spans.push_back({made.rows, rows, position, table.data()});
    made.rows += rows;
  }
  made.q.resize(static_cast<std::size_t>(made.rows * made.width()));
  for (auto& x : made.q) x = normal(random);
  made.wanted.resize(made.q.size());
  made.options.scale = scale_up / std::sqrt(static_cast<float>(made.head_size));
  for (std::size_t i = 0; i < made.spans.size(); ++i) made.spans[i].blocks = made.tables[i].data();
  attention_with(attention_kernels_portable(), 0, layer, made.spans, made.q.data(), made.width(), made.kv_heads * made.group,
                 made.wanted.data(), made.width(), made.options, workers);
}

/// `longest`: tokens of a sequence, at most.
inline AttentionCase random_case(int round, std::int64_t longest, std::mt19937& random) {
  const auto one_of = [&](std::initializer_list<std::int64_t> values) { return values.begin()[random() % values.size()]; };
  AttentionCase made;
  made.type = static_cast<CudaKvType>(round % 3);
  made.kv_heads = one_of({1, 2, 3});
  made.group = one_of({1, 2, 3, 4, 7, 8});
  made.head_size = one_of({20, 32, 64, 80, 96, 128, 256});
  made.processors = one_of({1, 4, 132});
  made.options.window = one_of({0, 0, 1, 5, 40, 300});
  made.options.softcap = static_cast<float>(one_of({0, 0, 3, 50}));
  std::vector<std::pair<std::int64_t, std::int64_t>> spans;
  for (std::int64_t i = one_of({1, 2, 4}); i > 0; --i) {
    const std::int64_t position = one_of({0, 1, 15, 16, 33, static_cast<std::int64_t>(random()) % longest});
    spans.emplace_back(position, one_of({1, 1, 2, 7, 20}));
  }
  fill_case(made, spans, round % 5 == 0 ? 8.0F : 1.0F, random);
  return made;
}

}  // namespace unshard::inference::testing
