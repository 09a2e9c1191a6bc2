// The plan, simulated: within its budget, in time, the same on every rank.
#include "zero/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>

namespace unshard::zero {
namespace {

std::vector<PlanParameter> sized(const std::vector<std::int64_t>& numels) {
  std::vector<PlanParameter> parameters;
  for (const auto numel : numels) parameters.push_back({numel, numel, numel * 4});
  return parameters;
}

std::vector<std::size_t> issues(const Plan& plan) {
  std::vector<std::size_t> all;
  for (const auto& gather : plan.gathers) all.push_back(gather.issue);
  return all;
}

constexpr std::int64_t kNoFusing = 0;

TEST(Plan, WhatFitsIsGatheredOnceAndKept) {
  const auto plan = make_plan({0, 1, 2, 1, 0}, sized({10, 20, 30}), {60, 1000, 1000, kNoFusing});
  EXPECT_TRUE(plan.keeps_all);
  EXPECT_EQ(plan.gathered_numel, 60);
  EXPECT_EQ(plan.peak_numel, 60);
  EXPECT_EQ(issues(plan), (std::vector<std::size_t>{0, 0, 0}));
}

TEST(Plan, GathersAheadStayWithinTheWindow) {
  const auto plan = make_plan({0, 1, 2, 3}, sized({10, 20, 30, 40}), {1000, 50, 1000, kNoFusing});
  // 20 may start with 10; 30 when the use of 10 has begun; 40 when that of 20 has: 30 + 40 > 50, so when that of 30 has.
  EXPECT_EQ(issues(plan), (std::vector<std::size_t>{0, 0, 1, 3}));
}

TEST(Plan, TheNextOneIsGatheredAheadWhateverItsSize) {
  const auto plan = make_plan({0, 1}, sized({10, 500}), {1000, 50, 1000, kNoFusing});
  EXPECT_EQ(issues(plan), (std::vector<std::size_t>{0, 1}));
}

TEST(Plan, WithoutAWindowEveryGatherIsItsTouchs) {
  const auto plan = make_plan({0, 1}, sized({10, 10}), {1000, 0, 1000, kNoFusing});
  EXPECT_EQ(issues(plan), (std::vector<std::size_t>{1, 2}));
}

TEST(Plan, WhatIsUsedLastLeavesFirst) {
  // Forward and backward over three blocks with room for two: block 2 is still here when backward starts with it.
  const auto plan = make_plan({0, 1, 2, 1, 0}, sized({10, 10, 10}), {20, 0, 1000, kNoFusing});
  EXPECT_EQ(plan.release_after, (std::vector<std::uint8_t>{1, 0, 1, 0, 0}));
  EXPECT_EQ(plan.gathered_numel, 40);  // block 0 twice
}

TEST(Plan, WhatIsReusedTooLateLeavesAtOnce) {
  const auto plan = make_plan({0, 1, 2, 0}, sized({10, 10, 10}), {1000, 0, 19, kNoFusing});
  EXPECT_EQ(plan.release_after, (std::vector<std::uint8_t>{1, 0, 0, 0}));
  EXPECT_FALSE(plan.keeps_all);
}

TEST(Plan, SmallGathersTravelTogether) {
  const auto plan = make_plan({0, 1, 2, 3, 4}, sized({1, 1, 100, 1, 1}), {1000, 1000, 1000, 40});
  ASSERT_EQ(plan.gathers.size(), 3U);
  EXPECT_EQ(plan.gathers[0].ids, (std::vector<int>{0, 1}));
  EXPECT_EQ(plan.gathers[1].ids, (std::vector<int>{2}));
  EXPECT_EQ(plan.gathers[2].ids, (std::vector<int>{3, 4}));
  EXPECT_EQ(plan.gathers[2].first_use, 3U);
  EXPECT_EQ(plan.gathers[2].last_use, 4U);
}

TEST(Plan, ParametersThatRestHereNeedNoGather) {
  const auto plan = make_plan({0, 1, 0}, {{10, 0, 0}, {10, 5, 20}}, {1000, 1000, 1000, kNoFusing});
  ASSERT_EQ(plan.gathers.size(), 1U);
  EXPECT_EQ(plan.gathers[0].ids, std::vector<int>{1});
}

// Touches times parameters would be 10^10 steps, most of a minute.
TEST(Plan, TakesAMomentForAHundredThousandParameters) {
  constexpr int kCount = 100'000;
  std::vector<int> trace;
  for (int i = 0; i < kCount; ++i) trace.push_back(i);
  for (int i = kCount - 1; i-- > 0;) trace.push_back(i);
  const auto started = std::chrono::steady_clock::now();
  const auto plan = make_plan(trace, sized(std::vector<std::int64_t>(kCount, 10)), {kCount * 10LL, kCount * 10LL, kCount * 20LL, 100});
  EXPECT_LT(std::chrono::steady_clock::now() - started, std::chrono::seconds(5));
  EXPECT_TRUE(plan.keeps_all);
  EXPECT_EQ(plan.peak_numel, kCount * 10);
}

struct Program {
  std::vector<int> trace;
  std::vector<PlanParameter> parameters;
  PlanOptions options;
};

Program random_program(unsigned seed) {
  std::mt19937 random(seed);
  Program program;
  const int count = 1 + static_cast<int>(random() % 40);
  for (int i = 0; i < count; ++i) {
    const std::int64_t numel = 1 + static_cast<std::int64_t>(random() % (random() % 4 ? 20 : 500));
    program.parameters.push_back({numel * 2, random() % 10 ? numel : 0, numel * 2});
  }
  if (random() % 2) {  // a step: forward and backward, now and then with a tied weight
    for (int i = 0; i < count; ++i) program.trace.push_back(i);
    if (random() % 2) program.trace.push_back(0);
    for (int i = count; i-- > 0;) program.trace.push_back(i);
  } else {
    for (int i = static_cast<int>(random() % 300); i > 0; --i)
      program.trace.push_back(static_cast<int>(random() % static_cast<unsigned>(count)));
  }
  program.trace.erase(std::unique(program.trace.begin(), program.trace.end()), program.trace.end());
  program.options.budget_numel = static_cast<std::int64_t>(random() % (random() % 2 ? 300 : 20000));
  program.options.prefetch_numel = static_cast<std::int64_t>(random() % 5 ? random() % 2000 : 0);
  program.options.max_reuse_distance = random() % 3 ? 1'000'000 : static_cast<std::int64_t>(random() % 500);
  program.options.fuse_bytes = static_cast<std::int64_t>(random() % 3 ? random() % 200 : 0);
  return program;
}

class RandomPlans : public testing::TestWithParam<unsigned> {};

// Ranks at their worst: a gather is here from the moment it may start, a release happens when its touch has ended.
TEST_P(RandomPlans, StayWithinTheBudgetAndGatherBeforeUse) {
  const auto [trace, parameters, options] = random_program(GetParam());
  const auto plan = make_plan(trace, parameters, options);
  std::int64_t live = 0, gathered = 0, largest = 0;
  for (const int id : trace) largest = std::max(largest, parameters[static_cast<std::size_t>(id)].gather_numel);
  std::vector<std::uint8_t> here(parameters.size());
  std::size_t next = 0;
  const auto gather_what_may_start = [&](std::size_t begun) {
    for (; next < plan.gathers.size() && plan.gathers[next].issue <= begun; ++next) {
      ASSERT_TRUE(next == 0 || plan.gathers[next - 1].first_use < plan.gathers[next].first_use);
      ASSERT_LE(plan.gathers[next].issue, plan.gathers[next].first_use + 1);
      for (const int id : plan.gathers[next].ids) {
        ASSERT_FALSE(here[static_cast<std::size_t>(id)]) << "gathered twice: " << id;
        here[static_cast<std::size_t>(id)] = 1;
        live += parameters[static_cast<std::size_t>(id)].gather_numel;
        gathered += parameters[static_cast<std::size_t>(id)].gather_numel;
      }
    }
    ASSERT_LE(live, std::max(options.budget_numel, largest)) << "after " << begun << " touches";
    ASSERT_LE(live, plan.peak_numel);
  };
  gather_what_may_start(0);
  for (std::size_t p = 0; p < trace.size(); ++p) {
    gather_what_may_start(p + 1);
    const auto id = static_cast<std::size_t>(trace[p]);
    ASSERT_TRUE(here[id] || parameters[id].gather_numel == 0) << "touch " << p << " of " << id << " comes before its gather";
    if (plan.release_after[p]) here[id] = 0, live -= parameters[id].gather_numel;
  }
  EXPECT_EQ(next, plan.gathers.size()) << "gathers nobody needs";
  EXPECT_EQ(gathered, plan.gathered_numel);
}

TEST_P(RandomPlans, AreEqualOnEveryRank) {
  const auto program = random_program(GetParam());
  const auto plan = make_plan(program.trace, program.parameters, program.options);
  for (int rank = 1; rank < 4; ++rank) {
    const auto other = random_program(GetParam());
    EXPECT_EQ(make_plan(other.trace, other.parameters, other.options), plan);
  }
}

TEST_P(RandomPlans, BringInNoMoreThanLeastRecentlyUsedWould) {
  auto [trace, parameters, options] = random_program(GetParam());
  options.max_reuse_distance = 1'000'000;
  for (auto& parameter : parameters) parameter.gather_numel = 1;  // equal sizes: Belady's rule is the best there is
  options.budget_numel = std::max<std::int64_t>(1, options.budget_numel % 30);
  const auto plan = make_plan(trace, parameters, options);
  std::int64_t brought = 0;
  std::vector<int> recent;
  for (const int id : trace) {
    const auto at = std::find(recent.begin(), recent.end(), id);
    if (at != recent.end())
      recent.erase(at);
    else
      ++brought;
    recent.push_back(id);
    if (static_cast<std::int64_t>(recent.size()) > options.budget_numel) recent.erase(recent.begin());
  }
  EXPECT_LE(plan.gathered_numel, brought);
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomPlans, testing::Range(0U, 300U));

}  // namespace
}  // namespace unshard::zero
