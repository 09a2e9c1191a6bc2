#include "inference/kernels/attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "core/cpu_isa.h"
#include "inference/kernels/attention_internal.h"

namespace unshard::inference {
namespace {

constexpr KvType kTypes[] = {KvType::f32, KvType::bf16, KvType::int8};

std::vector<const AttentionKernels*> tables() {
  std::vector<const AttentionKernels*> all = {&attention_kernels_portable()};
  if (kernels::selected_isa() >= kernels::Isa::avx2) all.push_back(&attention_kernels_avx2());
  if (kernels::selected_isa() >= kernels::Isa::avx512) all.push_back(&attention_kernels_avx512());
  return all;
}

std::vector<float> normal(std::int64_t n, std::mt19937& random) {
  std::normal_distribution<float> distribution;
  std::vector<float> values(static_cast<std::size_t>(n));
  for (auto& value : values) value = distribution(random);
  return values;
}

struct Shape {
  KvType type = KvType::bf16;
  std::int64_t kv_heads = 1, group = 1, head_size = 64;
  std::int64_t heads() const { return kv_heads * group; }
};

/// A cache full of NaN, so that what was never stored is noticed, and sequences with their keys, values and queries.
struct Cache {
  Shape shape;
  std::vector<float> memory;  // float: aligned
  std::vector<std::int32_t> free;
  KvLayer layer;

  Cache(const Shape& shape, std::int64_t blocks, std::mt19937& random) : shape(shape), free(static_cast<std::size_t>(blocks)) {
    const std::int64_t bytes = blocks * kv_block_bytes(shape.type, shape.kv_heads, shape.head_size);
    memory.resize(static_cast<std::size_t>((bytes + 3) / 4));
    std::memset(memory.data(), 0xff, memory.size() * 4);
    std::iota(free.begin(), free.end(), 0);
    std::shuffle(free.begin(), free.end(), random);
    layer = {memory.data(), shape.type, shape.kv_heads, shape.head_size};
  }
  /// Key (or value) of a token as the cache holds it.
  double held(const std::vector<std::int32_t>& blocks, std::int64_t position, std::int64_t head, std::int64_t d, bool value) const {
    const KvLayout layout = kv_layout(shape.type, shape.kv_heads, shape.head_size);
    const std::int64_t slot = position % 16;
    const char* block =
        reinterpret_cast<const char*>(memory.data()) + blocks[position / 16] * layout.block_bytes + head * layout.head_bytes;
    const std::int64_t at = value ? slot * layout.value_stride + d : d * 16 + slot;
    const char* data = block + (value ? layout.values_at : 0);
    if (shape.type == KvType::f32) return reinterpret_cast<const float*>(data)[at];
    if (shape.type == KvType::bf16) {
      const std::uint32_t bits = std::uint32_t{reinterpret_cast<const std::uint16_t*>(data)[at]} << 16;
      return __builtin_bit_cast(float, bits);
    }
    const auto* scales = reinterpret_cast<const float*>(block + (value ? layout.value_scales_at : layout.key_scales_at));
    return static_cast<double>(reinterpret_cast<const std::int8_t*>(data)[at]) * scales[slot];
  }
};

struct Sequence {
  std::int64_t length;
  std::vector<std::int32_t> blocks;
  std::vector<float> q, k, v, out;

  Sequence(Cache& cache, std::int64_t length, std::mt19937& random) : length(length) {
    const std::int64_t features = cache.shape.heads() * cache.shape.head_size, kv_features = cache.shape.kv_heads * cache.shape.head_size;
    q = normal(length * features, random);
    k = normal(length * kv_features, random);
    v = normal(length * kv_features, random);
    out.assign(q.size(), -7);
    for (std::int64_t b = 0; b * 16 < length; ++b) {
      blocks.push_back(cache.free.back());
      cache.free.pop_back();
    }
  }
};

/// Store and compute rows [begin, begin + rows) of each sequence in one call.
struct Piece {
  Sequence* sequence;
  std::int64_t begin, rows;
};
struct How {
  const AttentionKernels* kernels;
  Workers* workers;
  std::int64_t piece_rows = 0;
  AttentionOptions options;
};
void compute(Cache& cache, const std::vector<Piece>& pieces, const How& how) {
  const std::int64_t features = cache.shape.heads() * cache.shape.head_size, kv_features = cache.shape.kv_heads * cache.shape.head_size;
  const std::int64_t stride = features + 2 * kv_features;  // as one product gives them
  std::vector<AttentionSpan> spans;
  std::vector<float> qkv;
  std::int64_t row = 0;
  for (const Piece& piece : pieces) {
    spans.push_back({row, piece.rows, piece.begin, piece.sequence->blocks.data()});
    row += piece.rows;
    for (std::int64_t r = piece.begin; r < piece.begin + piece.rows; ++r) {
      qkv.insert(qkv.end(), piece.sequence->q.begin() + r * features, piece.sequence->q.begin() + (r + 1) * features);
      qkv.insert(qkv.end(), piece.sequence->k.begin() + r * kv_features, piece.sequence->k.begin() + (r + 1) * kv_features);
      qkv.insert(qkv.end(), piece.sequence->v.begin() + r * kv_features, piece.sequence->v.begin() + (r + 1) * kv_features);
    }
  }
  const std::int64_t out_stride = features + 3;
  std::vector<float> out(static_cast<std::size_t>(row * out_stride), -7);
  kv_store(cache.layer, spans, qkv.data() + features, qkv.data() + features + kv_features, stride, *how.workers);
  attention_with(*how.kernels, how.piece_rows, cache.layer, spans, qkv.data(), stride, cache.shape.heads(), out.data(), out_stride,
                 how.options, *how.workers);
  for (std::size_t i = 0; i < spans.size(); ++i)
    for (std::int64_t r = 0; r < spans[i].rows; ++r) {
      const auto from = out.begin() + (spans[i].first_row + r) * out_stride;
      std::copy(from, from + features, pieces[i].sequence->out.begin() + (pieces[i].begin + r) * features);
      for (std::int64_t beyond = features; beyond < out_stride; ++beyond) ASSERT_EQ(from[beyond], -7);
    }
}

/// One row of one head in doubles, from what the cache holds. \return the largest difference to what was computed
double error_of_row(const Cache& cache, const Sequence& sequence, std::int64_t position, std::int64_t head,
                    const AttentionOptions& options) {
  const std::int64_t size = cache.shape.head_size, kv_head = head / cache.shape.group;
  const std::int64_t first = options.window > 0 ? std::max<std::int64_t>(0, position - options.window + 1) : 0;
  const std::int64_t last = options.causal ? position : sequence.length - 1;
  const std::int64_t at = (position * cache.shape.heads() + head) * size;
  std::vector<double> scores, wanted(static_cast<std::size_t>(size));
  double most = -1e300, sum = 0;
  for (std::int64_t t = first; t <= last; ++t) {
    double score = 0;
    for (std::int64_t d = 0; d < size; ++d) score += sequence.q[at + d] * cache.held(sequence.blocks, t, kv_head, d, false);
    score *= options.scale;
    if (options.softcap > 0) score = options.softcap * std::tanh(score / options.softcap);
    scores.push_back(score);
    most = std::max(most, score);
  }
  for (auto& score : scores) sum += score = std::exp(score - most);
  for (std::int64_t t = first; t <= last; ++t)
    for (std::int64_t d = 0; d < size; ++d) wanted[d] += scores[t - first] / sum * cache.held(sequence.blocks, t, kv_head, d, true);
  double worst = 0;
  for (std::int64_t d = 0; d < size; ++d) {
    const double error = std::abs(sequence.out[at + d] - wanted[d]);
    worst = error <= worst ? worst : error;  // NaN: taken over
  }
  return worst;
}

TEST(Attention, MatchesDoublesForEveryTypeGroupHeadSizeWindowAndSoftcap) {
  std::mt19937 random(1);
  Workers workers(2, false);
  const auto one_of = [&](std::initializer_list<std::int64_t> values) { return values.begin()[random() % values.size()]; };
  for (int round = 0; round < 36; ++round) {
    const Shape shape = {kTypes[round % 3], one_of({1, 2, 3}), one_of({1, 2, 3, 4, 7, 8}), one_of({20, 32, 40, 64, 80, 96, 128, 256})};
    AttentionOptions options = {1 / std::sqrt(static_cast<float>(shape.head_size)), one_of({0, 0, 1, 20, 100, 300}),
                                static_cast<float>(one_of({0, 0, 3, 50}))};
    if (round % 7 == 0) options.scale *= 8;  // a few keys have nearly all of the weight
    Cache cache(shape, 200, random);
    Sequence a(cache, one_of({1, 16, 255, 256, 257, 600}), random), b(cache, 1 + static_cast<std::int64_t>(random() % 300), random);
    for (const AttentionKernels* kernels : tables()) {
      const How how = {kernels, &workers, 0, options};
      const std::int64_t cut = static_cast<std::int64_t>(random()) % b.length;
      compute(cache, {{&a, 0, a.length}, {&b, 0, cut}}, how);
      compute(cache, {{&b, cut, b.length - cut}}, how);
      for (Sequence* sequence : {&a, &b})
        for (int sample = 0; sample < 8; ++sample) {
          const std::int64_t position = sample == 0 ? sequence->length - 1 : static_cast<std::int64_t>(random()) % sequence->length;
          const std::int64_t head = static_cast<std::int64_t>(random()) % shape.heads();
          // Scores of up to about 8 * 4 with rounding of 2^-24 a sum of head_size products; tanh adds 1e-7 of the cap.
          ASSERT_LE(error_of_row(cache, *sequence, position, head, options), 2e-5)
              << "round " << round << " head_size " << shape.head_size << " group " << shape.group << " window " << options.window
              << " softcap " << options.softcap << " position " << position << " of " << sequence->length;
        }
    }
  }
}

TEST(Attention, ARowsBitsDependOnNeitherBatchNorChunksNorTilesNorWorkers) {
  std::mt19937 random(2);
  Workers one(1), three(3, false), five(5, false);
  constexpr std::int64_t kLength = 700;  // three chunks
  for (const KvType type : kTypes) {
    for (const std::int64_t window : {0, type == KvType::bf16 ? 37 : 400}) {
      const Shape shape = {type, 1, 3, 32};
      const AttentionOptions options = {0.125F, window, 0};
      for (const AttentionKernels* kernels : tables()) {
        Cache cache(shape, 100, random);
        Sequence whole(cache, kLength, random), other(cache, 300, random);
        compute(cache, {{&whole, 0, kLength}}, {kernels, &one, 0, options});
        const auto wanted = whole.out;
        for (int round = 0; round < 3; ++round) {
          std::fill(whole.out.begin(), whole.out.end(), -7.0F);
          Workers* workers = round == 0 ? &one : round == 1 ? &three : &five;
          for (std::int64_t begin = 0; begin < whole.length;) {
            const std::int64_t step = 1 + static_cast<std::int64_t>(random()) % (begin > kLength - 30 ? 3 : 150);
            const std::int64_t rows = std::min(step, whole.length - begin);
            const How how = {kernels, workers, static_cast<std::int64_t>(random() % 40), options};
            if (random() % 2)
              compute(cache, {{&other, begin % 200, 1 + begin % 100}, {&whole, begin, rows}}, how);
            else
              compute(cache, {{&whole, begin, rows}}, how);
            begin += rows;
          }
          ASSERT_EQ(std::memcmp(wanted.data(), whole.out.data(), wanted.size() * sizeof(float)), 0) << "round " << round;
        }
      }
    }
  }
}

TEST(Attention, WithoutCausalityEachRowSeesAllOfItsSequenceAndNothingElse) {
  std::mt19937 random(8);
  Workers one(1), four(4, false);
  const auto one_of = [&](std::initializer_list<std::int64_t> values) { return values.begin()[random() % values.size()]; };
  for (int round = 0; round < 12; ++round) {
    const Shape shape = {kTypes[round % 3], one_of({1, 3}), one_of({1, 1, 2}), one_of({20, 32, 64})};
    AttentionOptions options = {1 / std::sqrt(static_cast<float>(shape.head_size)), 0, round % 4 == 3 ? 5.0F : 0.0F};
    options.causal = false;
    for (const AttentionKernels* kernels : tables()) {
      Cache cache(shape, 200, random);
      Sequence a(cache, one_of({1, 15, 16, 17, 255, 256, 257, 700}), random),
          b(cache, 1 + static_cast<std::int64_t>(random() % 60), random);
      compute(cache, {{&a, 0, a.length}, {&b, 0, b.length}}, {kernels, &four, 0, options});
      for (const Sequence* sequence : {&a, &b})
        for (int sample = 0; sample < 8; ++sample) {
          const std::int64_t position = sample == 0 ? 0 : static_cast<std::int64_t>(random()) % sequence->length;
          const std::int64_t head = static_cast<std::int64_t>(random()) % shape.heads();
          ASSERT_LE(error_of_row(cache, *sequence, position, head, options), 2e-5)
              << "round " << round << " position " << position << " of " << sequence->length;
        }
      const auto wanted = a.out;
      compute(cache, {{&a, 0, a.length}}, {kernels, &one, static_cast<std::int64_t>(1 + random() % 50), options});
      ASSERT_EQ(std::memcmp(wanted.data(), a.out.data(), wanted.size() * sizeof(float)), 0) << "round " << round;
    }
  }
}

TEST(Attention, BlocksThatTheWindowHasLeftBehindAreNotTouched) {
  std::mt19937 random(3);
  Workers workers(3, false);
  const Shape shape = {KvType::bf16, 1, 4, 32};
  for (const AttentionKernels* kernels : tables()) {
    Cache cache(shape, 100, random);
    Sequence sequence(cache, 900, random);
    const How how = {kernels, &workers, 0, {0.2F, 50, 0}};
    compute(cache, {{&sequence, 0, 700}}, how);
    const std::vector<std::int32_t> blocks = sequence.blocks;
    for (std::int64_t b = 0; b < (700 - 49) / 16; ++b) sequence.blocks[b] = INT32_MAX / 2;  // would fault
    compute(cache, {{&sequence, 700, 200}}, how);
    for (const std::int64_t position : {700, 701, 899}) EXPECT_LE(error_of_row(cache, sequence, position, 1, how.options), 2e-6);
  }
}

TEST(Attention, ManyWorkersSplitOneLongDecodeAlongItsKeys) {
  std::mt19937 random(4);
  Workers eight(8, false);
  const Shape shape = {KvType::bf16, 1, 3, 64};
  for (const AttentionKernels* kernels : tables()) {
    Cache cache(shape, 150, random);
    Sequence sequence(cache, 2200, random);
    const How how = {kernels, &eight, 0, {0.125F, 0, 0}};
    compute(cache, {{&sequence, 0, 2199}}, how);
    compute(cache, {{&sequence, 2199, 1}}, how);
    for (std::int64_t head = 0; head < 3; ++head) EXPECT_LE(error_of_row(cache, sequence, 2199, head, how.options), 2e-6);
  }
}

TEST(Attention, ANaNInAKeyOrValueReachesTheResultOfThoseThatSeeIt) {
  std::mt19937 random(5);
  Workers workers(1);
  for (const KvType type : kTypes) {
    for (const AttentionKernels* kernels : tables()) {
      Cache cache({type, 1, 1, 64}, 20, random);
      Sequence sequence(cache, 40, random);
      sequence.k[20 * 64 + 5] = std::nanf("");
      compute(cache, {{&sequence, 0, 20}}, {kernels, &workers, 0, {0.125F, 0, 0}});
      compute(cache, {{&sequence, 20, 20}}, {kernels, &workers, 0, {0.125F, 0, 0}});
      EXPECT_FALSE(std::isnan(sequence.out[19 * 64]));
      for (std::int64_t row = 20; row < 40; ++row) EXPECT_TRUE(std::isnan(sequence.out[row * 64])) << row;
    }
  }
}

TEST(KvCache, HoldsKeysAndValuesAsItsTypeCan) {
  std::mt19937 random(6);
  Workers workers(2, false);
  for (const KvType type : kTypes) {
    Cache cache({type, 3, 2, 40}, 20, random);
    Sequence sequence(cache, 100, random);
    for (std::int64_t i = 0; i < 40; ++i) sequence.v[i] = 0;  // a row of zeros has no scale
    compute(cache, {{&sequence, 0, 37}}, {&attention_kernels(), &workers, 0, {0.1F, 0, 0}});
    compute(cache, {{&sequence, 37, 63}}, {&attention_kernels(), &workers, 0, {0.1F, 0, 0}});
    for (std::int64_t t = 0; t < 100; ++t)
      for (std::int64_t head = 0; head < 3; ++head) {
        for (const bool value : {false, true}) {
          const float* row = (value ? sequence.v : sequence.k).data() + (t * 3 + head) * 40;
          float most = 0;
          for (std::int64_t d = 0; d < 40; ++d) most = std::max(most, std::abs(row[d]));
          for (std::int64_t d = 0; d < 40; ++d) {
            const double tolerance = type == KvType::f32 ? 0 : type == KvType::bf16 ? std::abs(row[d]) / 256 : most / 127 * 0.5001;
            ASSERT_NEAR(cache.held(sequence.blocks, t, head, d, value), row[d], tolerance);
          }
        }
      }
  }
}

TEST(KvCache, ACopiedBlockGivesTheSameBits) {
  std::mt19937 random(7);
  Workers workers(1);
  for (const KvType type : kTypes) {
    Cache cache({type, 2, 2, 64}, 20, random);
    Sequence sequence(cache, 60, random);
    compute(cache, {{&sequence, 0, 60}}, {&attention_kernels(), &workers, 0, {0.125F, 0, 0}});
    const auto wanted = sequence.out;
    const std::int32_t to = cache.free.back(), from = sequence.blocks[1];
    kv_copy_block(cache.layer, from, to);
    const auto bytes = kv_block_bytes(type, 2, 64);
    std::memset(reinterpret_cast<char*>(cache.memory.data()) + from * bytes, 0xff, static_cast<std::size_t>(bytes));
    sequence.blocks[1] = to;
    compute(cache, {{&sequence, 59, 1}}, {&attention_kernels(), &workers, 0, {0.125F, 0, 0}});
    EXPECT_EQ(wanted, sequence.out);
  }
}

TEST(Attention, HeadsThatDontShareEvenlyAreRefused) {
  Workers workers(1);
  const KvLayer layer = {nullptr, KvType::bf16, 3, 64};
  EXPECT_THROW(attention(layer, {}, nullptr, 0, 10, nullptr, 0, {}, workers), std::invalid_argument);
}

TEST(Attention, AWindowToBothSidesIsRefused) {
  Workers workers(1);
  const KvLayer layer = {nullptr, KvType::bf16, 2, 64};
  EXPECT_THROW(attention(layer, {}, nullptr, 0, 2, nullptr, 0, {1, 8, 0, false}, workers), std::invalid_argument);
}

}  // namespace
}  // namespace unshard::inference
