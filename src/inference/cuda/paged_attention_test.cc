// The CUDA kernel's own source on the processor (emulated_device.h), against the portable CPU kernel; and the plan that divides the work.
#include "inference/cuda/paged_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "inference/cuda/emulated_device.h"
#include "inference/cuda/paged_attention_testing.h"

namespace unshard::inference {
namespace emulated {
namespace {
#define UNSHARD_UNROLL
#include "inference/cuda/paged_attention_kernels.inc"

struct Launcher {
  std::mt19937& random;
  template <class... Arguments>
  void operator()(const Grid& grid, void (*kernel)(Arguments...), Arguments... arguments) const {
    launch({grid.x, grid.y, grid.z}, kThreads, random, [&] { kernel(arguments...); });
  }
};
}  // namespace
}  // namespace emulated

namespace {

using testing::AttentionCase;

std::vector<float> compute(const AttentionCase& given, std::mt19937& random) {
  const auto plan = plan_attention(given.spans, given.group, given.head_size);
  const auto floats = paged_attention_floats(plan, given.kv_heads, given.head_size, given.options.window, given.processors);
  std::vector<float> out(given.q.size(), -7), partials(static_cast<std::size_t>(floats), std::nanf(""));
  PagedAttention call;
  call.q = given.q.data();
  call.out = out.data();
  call.q_stride = call.out_stride = given.width();
  call.type = given.type;
  call.keys = given.keys.data();
  call.values = given.values.data();
  call.words = plan.words.data();
  call.kv_heads = given.kv_heads;
  call.group = given.group;
  call.head_size = given.head_size;
  call.options = given.options;
  call.partials = partials.data();
  emulated::launch_all(call, plan, given.processors, emulated::Launcher{random});
  return out;
}

TEST(PagedAttention, IsWhatTheCpuKernelComputesInAnyOrderOfThreads) {
  std::mt19937 random(1);
  for (int round = 0; round < 24; ++round) {
    const auto made = testing::random_case(round, 150, random);
    ASSERT_LE(made.error(compute(made, random)), 2e-5) << "round " << round << ": " << made.name();
  }
}

TEST(PagedAttention, PartsOfALongSequencesKeysAreOneResult) {
  std::mt19937 random(2);
  for (const std::int64_t window : {0, 600}) {
    AttentionCase made;
    made.type = CudaKvType::f16;
    made.group = 3;
    made.processors = 132;
    made.options.window = window;
    fill_case(made, {{1500, 1}, {20, 1}, {700, 3}}, 1, random);
    const auto plan = plan_attention(made.spans, made.group, made.head_size);
    ASSERT_GT(split_keys(plan.few, 1, window, 132).parts, 1);
    ASSERT_LE(made.error(compute(made, random)), 2e-5) << made.name();
  }
}

TEST(PagedAttention, ANaNReachesThoseThatSeeIt) {
  std::mt19937 random(3);
  AttentionCase made;
  made.type = CudaKvType::f32;
  fill_case(made, {{20, 20}}, 1, random);
  const std::int64_t token = 30, slot = made.tables[0][token / 16] * 16 + token % 16;
  for (auto* cache : {&made.keys, &made.values}) {
    auto broken = made;
    testing::put(cache == &made.keys ? broken.keys : broken.values, slot * made.head_size + 5, std::nanf(""), made.type);
    const auto out = compute(broken, random);
    for (std::int64_t row = 0; row < 20; ++row) EXPECT_EQ(std::isnan(out[static_cast<std::size_t>(row * 64 + 5)]), row >= 10) << row;
  }
}

TEST(AttentionPlan, GivesEachQueryToOneTileAndEachTileItsSequencesBlocks) {
  std::mt19937 random(4);
  for (int round = 0; round < 30; ++round) {
    const auto made = testing::random_case(round, 100, random);
    const auto plan = plan_attention(made.spans, made.group, made.head_size);
    std::map<std::int64_t, std::set<std::int64_t>> seen;  // of each sequence, by its first row
    for (const auto* list : {&plan.few, &plan.many}) {
      const auto* tiles = reinterpret_cast<const AttentionTileWords*>(plan.words.data() + list->begin);
      for (std::int64_t i = 0; i < list->tiles; ++i) {
        const auto span = std::find_if(made.spans.begin(), made.spans.end(), [&](const auto& s) { return s.first_row == tiles[i].row; });
        ASSERT_NE(span, made.spans.end());
        ASSERT_EQ(tiles[i].position, span->position);
        ASSERT_LE(tiles[i].count, list == &plan.few ? kFewQueries : queries_of_many(made.head_size));
        for (std::int32_t q = 0; q < tiles[i].count; ++q) ASSERT_TRUE(seen[tiles[i].row].insert(tiles[i].first + q).second);
        const auto blocks = (span->position + span->rows + 15) / 16;
        ASSERT_LE(tiles[i].table + blocks, static_cast<std::int64_t>(plan.words.size()));
        ASSERT_TRUE(std::equal(span->blocks, span->blocks + blocks, plan.words.begin() + tiles[i].table));
        ASSERT_GE(list->longest_keys, span->position + span->rows);
      }
    }
    for (const auto& span : made.spans) ASSERT_EQ(static_cast<std::int64_t>(seen[span.first_row].size()), span.rows * made.group);
  }
}

TEST(AttentionPlan, CutsKeysOnlyWhereBlocksAreTooFew) {
  const TileList one = {0, 1, 4000}, many = {0, 300, 4000}, brief = {0, 1, 200};
  EXPECT_EQ(split_keys(many, 8, 0, 132).parts, 1);
  EXPECT_EQ(split_keys(brief, 8, 0, 132).parts, 1);
  EXPECT_EQ(split_keys(one, 8, 100, 132).parts, 1);
  const auto split = split_keys(one, 8, 0, 132);
  EXPECT_GT(split.parts, 8);
  EXPECT_EQ(split.keys % 32, 0);
  EXPECT_GE(split.parts * split.keys, 4000);
  EXPECT_LT((split.parts - 1) * split.keys, 4000);
}

/// A kernel with a missing barrier: thread 0's word is read by the others before or after it is written.
void read_early(std::vector<int>& got, bool barrier) {
  static int word;
  if (emulated::threadIdx.x == 0) word = static_cast<int>(emulated::blockIdx.x) + 1;
  if (barrier) emulated::__syncthreads();
  got[emulated::threadIdx.x] = word;
}

TEST(EmulatedDevice, ShowsAMissingBarrierAndOneThatNotAllReach) {
  std::mt19937 random(5);
  for (const bool barrier : {true, false}) {
    std::vector<int> got(64);
    int wrong = 0;
    for (int block = 0; block < 4; ++block) {
      emulated::launch({1, 1, 1}, 64, random, [&] { emulated::blockIdx.x = static_cast<unsigned>(block), read_early(got, barrier); });
      wrong += static_cast<int>(std::count_if(got.begin(), got.end(), [&](int x) { return x != block + 1; }));
    }
    EXPECT_EQ(wrong > 0, !barrier);
  }
  const auto some = [] {
    if (emulated::threadIdx.x < 5) emulated::__syncthreads();
  };
  EXPECT_THROW(emulated::launch({1, 1, 1}, 64, random, some), std::logic_error);
}

}  // namespace
}  // namespace unshard::inference
