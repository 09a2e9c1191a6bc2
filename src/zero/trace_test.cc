#include "zero/trace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace unshard {
namespace {

struct Trace : TouchTrace {
  Trace(const std::vector<std::int64_t>& numels, const TraceOptions& options) : TouchTrace(options) {
    for (const auto numel : numels) add(numel);
  }
};

const std::vector<std::uint8_t> kNothingLive;

TEST(TouchTrace, TheFirstStepIsOnlyRecorded) {
  Trace trace({1, 1, 1}, {});
  trace.begin_step();
  for (const int id : {0, 1, 2}) EXPECT_TRUE(trace.touch(id, kNothingLive, 0).fetch.empty());
  EXPECT_EQ(trace.distance_to_next_use(0), INT64_MAX);
}

TEST(TouchTrace, AdvisesWhatComesNextInOrderUpToTheWindow) {
  Trace trace({10, 20, 30, 40}, {.prefetch_numel = 50});
  for (const int id : {0, 1, 2, 3}) trace.touch(id, kNothingLive, 0);
  trace.begin_step();
  EXPECT_EQ(trace.touch(0, kNothingLive, 0).fetch, (std::vector<int>{1, 2}));  // 20 + 30; 40 more would be 90
  EXPECT_EQ(trace.touch(1, {1, 1, 1, 0}, 60).fetch, (std::vector<int>{}));     // 30 is in flight and fills the window with 40
  EXPECT_EQ(trace.touch(2, {1, 1, 1, 0}, 60).fetch, (std::vector<int>{3}));
}

TEST(TouchTrace, ConsecutiveTouchesOfOneParameterAreOne) {
  Trace trace({1, 1, 1}, {});
  for (const int id : {0, 0, 0, 1, 1, 2}) trace.touch(id, kNothingLive, 0);
  trace.begin_step();
  EXPECT_EQ(trace.touch(0, kNothingLive, 0).fetch, (std::vector<int>{1, 2}));
  EXPECT_EQ(trace.distance_to_next_use(2), 1);  // parameter 1 once, although touched twice
  EXPECT_TRUE(trace.touch(0, kNothingLive, 0).fetch.empty());
  EXPECT_EQ(trace.distance_to_next_use(2), 1);
}

TEST(TouchTrace, TheLiveBudgetBoundsTheAdvice) {
  Trace trace({10, 20, 30}, {.prefetch_numel = 1000, .max_live_numel = 40});
  for (const int id : {0, 1, 2}) trace.touch(id, kNothingLive, 0);
  trace.begin_step();
  EXPECT_EQ(trace.touch(0, {1, 0, 0}, 10).fetch, (std::vector<int>{1}));
  EXPECT_TRUE(trace.touch(1, {1, 1, 0}, 41).fetch.empty());
}

TEST(TouchTrace, TheNextOneIsAdvisedEvenWhenLargerThanTheWindowIfTheBudgetHasRoom) {
  for (const bool room : {true, false}) {
    Trace trace({10, 500, 10, 10}, {.prefetch_numel = 50, .max_live_numel = room ? 510 : 509});
    for (const int id : {0, 1, 2, 3}) trace.touch(id, kNothingLive, 0);
    trace.begin_step();
    EXPECT_EQ(trace.touch(0, {1, 0, 0, 0}, 10).fetch, room ? std::vector<int>{1} : std::vector<int>{});  // and nothing behind it
    EXPECT_EQ(trace.touch(1, {0, 1, 0, 0}, 0).fetch, (std::vector<int>{2, 3}));
  }
}

TEST(TouchTrace, NoPrefetchMeansNoAdvice) {
  Trace trace({1, 1}, {.prefetch_numel = 0});
  for (const int id : {0, 1}) trace.touch(id, kNothingLive, 0);
  trace.begin_step();
  EXPECT_TRUE(trace.touch(0, kNothingLive, 0).fetch.empty());
}

TEST(TouchTrace, AStepWithoutTouchesKeepsTheTrace) {
  Trace trace({1, 1}, {});
  for (const int id : {0, 1}) trace.touch(id, kNothingLive, 0);
  trace.begin_step();
  trace.begin_step();
  EXPECT_EQ(trace.touch(0, kNothingLive, 0).fetch, (std::vector<int>{1}));
}

TEST(TouchTrace, ParametersOutsideTheTraceAndSkippedOnesDoNotLoseIt) {
  Trace trace({1, 1, 1, 1, 1}, {.prefetch_numel = 1});
  for (const int id : {0, 1, 2, 3}) trace.touch(id, kNothingLive, 0);
  trace.begin_step();
  EXPECT_EQ(trace.touch(0, kNothingLive, 0).fetch, (std::vector<int>{1}));
  EXPECT_EQ(trace.touch(4, kNothingLive, 0).fetch, (std::vector<int>{1}));  // new: 1 is still what comes next
  EXPECT_EQ(trace.touch(2, kNothingLive, 0).fetch, (std::vector<int>{3}));  // 1 skipped
  trace.begin_step();                                                       // this step was recorded as it was
  EXPECT_EQ(trace.touch(0, kNothingLive, 0).fetch, (std::vector<int>{4}));
}

TEST(TouchTrace, ASecondForwardWithoutBackwardIsFollowed) {
  Trace trace({1, 1, 1, 1}, {.prefetch_numel = 1});
  for (const int id : {0, 1, 2, 3, 2, 1, 0}) trace.touch(id, kNothingLive, 0);  // forward, backward
  trace.begin_step();
  for (const int id : {0, 1, 2, 3}) trace.touch(id, kNothingLive, 0);
  trace.touch(0, kNothingLive, 0);  // starts over
  EXPECT_EQ(trace.touch(1, kNothingLive, 0).fetch, (std::vector<int>{2}));
  EXPECT_EQ(trace.touch(2, kNothingLive, 0).fetch, (std::vector<int>{3}));
}

TEST(TouchTrace, ATiedWeightReadInBetweenDoesNotThrowTheRestOff) {
  Trace trace({1, 1, 1, 1}, {.prefetch_numel = 1});
  const std::vector<int> step{0, 1, 2, 3, 0, 3, 2, 1, 0};  // 0: embedding and head
  for (const int id : step) trace.touch(id, kNothingLive, 0);
  trace.begin_step();
  for (const int id : {0, 1, 0}) trace.touch(id, kNothingLive, 0);  // someone looks at the embedding after block 1
  trace.touch(2, kNothingLive, 0);
  trace.touch(3, kNothingLive, 0);
  EXPECT_EQ(trace.touch(0, kNothingLive, 0).fetch, (std::vector<int>{3}));  // the head again, then backward through 3
}

TEST(TouchTrace, ReleasesWhatIsNeededLastFirst) {
  Trace trace({1, 2, 4, 8, 16}, {});
  for (const int id : {0, 1, 2, 3}) trace.touch(id, kNothingLive, 0);
  trace.begin_step();
  trace.touch(0, kNothingLive, 0);
  EXPECT_EQ(trace.distance_to_next_use(3), 2 + 4);
  EXPECT_EQ(trace.release_order({1, 0, 3, 4, 2}), (std::vector<int>{0, 4, 3, 2, 1}));  // 0 and 4: not expected, as given
}

TEST(TouchTrace, APassThatIsCutShortLeavesTheTrace) {
  Trace trace({1, 1, 1, 1, 1, 1}, {});
  const auto pass = [&](const std::vector<int>& ids) {
    for (const int id : ids) trace.advance(id);
    return trace.end_pass();
  };
  const std::vector<int> whole{0, 1, 2, 3, 4};
  EXPECT_TRUE(pass(whole));
  const auto hash = trace.followed_hash();
  EXPECT_FALSE(pass(whole));
  EXPECT_FALSE(pass({0, 1, 2})) << "it ended early";
  EXPECT_FALSE(pass({}));
  EXPECT_FALSE(pass({5})) << "a look at a weight";
  EXPECT_EQ(trace.followed(), whole);
  EXPECT_EQ(trace.followed_hash(), hash);
  EXPECT_TRUE(trace.recorded().empty());
  EXPECT_EQ(trace.position(), 0U);
  EXPECT_TRUE(pass({5})) << "a second time: this is what passes are like now";
  EXPECT_TRUE(pass(whole));
  EXPECT_EQ(trace.followed_hash(), hash) << "hashes tell nothing of the past";
  EXPECT_TRUE(pass({0, 2, 4})) << "another one";
}

TEST(TouchTrace, ToldWhetherAStepChangedIt) {
  Trace trace({1, 1}, {});
  trace.advance(0);
  EXPECT_TRUE(trace.begin_step());
  trace.advance(0);
  EXPECT_FALSE(trace.begin_step());
  EXPECT_FALSE(trace.begin_step()) << "no touches";
  trace.advance(1);
  EXPECT_TRUE(trace.begin_step());
}

// A store in miniature: keeps what is touched or advised live, releases by release_order within the budget.
class RandomPrograms : public testing::TestWithParam<int> {};

TEST_P(RandomPrograms, AdviceStaysWithinWindowAndBudgetAndNeverNamesLiveParameters) {
  std::mt19937 random(GetParam());
  const int count = 1 + random() % 30;
  std::vector<std::int64_t> numels(count);
  for (auto& numel : numels) numel = random() % 100;
  const TraceOptions options{.prefetch_numel = static_cast<int>(random() % 300), .max_live_numel = static_cast<int>(100 + random() % 600)};
  Trace trace(numels, options);
  std::vector<std::uint8_t> live(count);
  std::int64_t live_numel = 0;
  const auto bring = [&](int id) { live_numel += live[id] ? 0 : numels[id], live[id] = 1; };
  for (int i = 0; i < 2000; ++i) {
    if (random() % 50 == 0) trace.begin_step();
    const int id = random() % count;
    bring(id);
    const auto advice = trace.touch(id, live, live_numel);
    std::int64_t advised = 0;
    for (const int next : advice.fetch) {
      ASSERT_FALSE(live[next]) << "advice names a live parameter or the same one twice";
      bring(next);
      advised += numels[next];
    }
    ASSERT_TRUE(advised <= options.prefetch_numel || (advice.fetch.size() == 1 && options.prefetch_numel > 0)) << advised;
    ASSERT_TRUE(advice.fetch.empty() || live_numel <= options.max_live_numel) << live_numel << " > " << options.max_live_numel;
    std::vector<int> candidates;
    for (int other = 0; other < count; ++other)
      if (live[other] && other != id) candidates.push_back(other);
    const auto order = trace.release_order(candidates);
    ASSERT_TRUE(std::is_permutation(order.begin(), order.end(), candidates.begin(), candidates.end()));
    for (std::size_t k = 1; k < order.size(); ++k)
      ASSERT_GE(trace.distance_to_next_use(order[k - 1]), trace.distance_to_next_use(order[k]));
    for (std::size_t k = 0; k < order.size() && live_numel > options.max_live_numel / 2; ++k)
      live[order[k]] = 0, live_numel -= numels[order[k]];
  }
}

TEST_P(RandomPrograms, InARepeatedStepEveryTouchAfterTheFirstWasAdvisedBefore) {
  std::mt19937 random(GetParam());
  const int count = 2 + random() % 20;
  std::vector<std::int64_t> numels(count);
  for (auto& numel : numels) numel = 1 + random() % 50;
  Trace trace(numels, {.prefetch_numel = 1 + GetParam(), .max_live_numel = 1000});  // the next one may be larger than the window
  std::vector<int> step(1 + random() % 200);
  for (auto& id : step) id = random() % count;
  for (int repeat = 0; repeat < 3; ++repeat) {
    trace.begin_step();
    std::vector<std::uint8_t> live(count);  // released right after its touch: the hardest case
    std::int64_t live_numel = 0;
    for (std::size_t i = 0; i < step.size(); ++i) {
      const int id = step[i];
      ASSERT_TRUE(live[id] || repeat == 0 || i == 0) << "touch " << i << " of parameter " << id << " was not foreseen";
      if (!live[id]) live[id] = 1, live_numel += numels[id];
      for (const int next : trace.touch(id, live, live_numel).fetch) live[next] = 1, live_numel += numels[next];
      const bool again = i + 1 < step.size() && step[i + 1] == id;
      if (!again && live[id]) live[id] = 0, live_numel -= numels[id];
    }
  }
}

TEST_P(RandomPrograms, AfterADivergenceTheTraceIsFoundAgain) {
  std::mt19937 random(GetParam());
  const int count = 10 + random() % 20;
  Trace trace(std::vector<std::int64_t>(count, 1), {.prefetch_numel = 1});
  std::vector<int> step(count);  // each parameter once: every position is unambiguous
  std::iota(step.begin(), step.end(), 0);
  std::shuffle(step.begin(), step.end(), random);
  for (const int id : step) trace.touch(id, kNothingLive, 0);
  trace.begin_step();
  for (int i = 0; i < 50; ++i) {
    const int jump = random() % (count - 1);
    const auto advice = trace.touch(step[jump], kNothingLive, 0);
    if (i > 0 && advice.fetch.empty()) continue;  // the same parameter twice in a row
    ASSERT_EQ(advice.fetch, std::vector<int>{step[jump + 1]});
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomPrograms, testing::Range(0, 50));

}  // namespace
}  // namespace unshard
