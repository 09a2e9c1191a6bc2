// The plan, simulated: within its budget, in time, the same on every rank.
#include "zero/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <numeric>
#include <random>

#include "zero/trace.h"

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

// Ranks of several hosts, each with what it alone has seen. They exchange one hash, and decide by the hashes alone whether they follow one
// plan.
class Ranks {
 public:
  Ranks(const Program& program, const std::vector<int>& ranks_per_host, std::mt19937& random) : program_(program), random_(random) {
    for (std::size_t host = 0; host < ranks_per_host.size(); ++host) {
      for (int i = 0; i < ranks_per_host[host]; ++i) {
        auto& rank = ranks_.emplace_back();
        rank.host = host;
        rank.trace = std::make_unique<TouchTrace>(TraceOptions{});
        for (const auto& parameter : program.parameters) rank.trace->add(parameter.numel);
      }
    }
  }

  /// What may differ: what earlier steps touched, and how often in a row, or for how many operators, a parameter is touched.
  void differ_in_the_past() {
    for (auto& rank : ranks_) {
      for (auto steps = random_() % 3; steps > 0; --steps) {
        for (auto touches = random_() % 20; touches > 0; --touches) rank.touch(static_cast<int>(random_() % program_.parameters.size()));
        random_() % 2 ? rank.trace->begin_step() : rank.trace->end_pass();
      }
      rank.trace->begin_step();
    }
  }
  void run(std::size_t rank, const std::vector<int>& trace) {
    for (const int id : trace) {
      for (auto repeats = 1 + random_() % 3; repeats > 0; --repeats) ranks_[rank].touch(id);
    }
  }
  bool agree() const {
    return std::all_of(ranks_.begin(), ranks_.end(),
                       [&](const Rank& rank) { return rank.trace->recorded_hash() == ranks_[0].trace->recorded_hash(); });
  }
  /// The next step's plan, as each rank makes it for itself.
  std::vector<Plan> plans() {
    std::vector<Plan> all;
    for (auto& rank : ranks_) {
      rank.trace->begin_step();
      auto parameters = program_.parameters;
      for (auto& parameter : parameters) {  // what rests elsewhere is another part of each on every host
        parameter.gather_numel = parameter.gather_numel * static_cast<std::int64_t>(rank.host + 1) / 4;
        parameter.gather_bytes = parameter.gather_numel * 2;
      }
      all.push_back(make_plan(rank.trace->followed(), parameters, program_.options));
    }
    return all;
  }
  std::size_t size() const { return ranks_.size(); }
  std::size_t host_of(std::size_t rank) const { return ranks_[rank].host; }

 private:
  struct Rank {
    std::size_t host = 0;
    std::unique_ptr<TouchTrace> trace;
    void touch(int id) { trace->touch(id, {}, 0); }
  };
  const Program& program_;
  std::mt19937& random_;
  std::vector<Rank> ranks_;
};

TEST_P(RandomPlans, AreEqualForTheRanksOfAHostWhereHashesAreAndHashesDifferWhereTouchesDo) {
  const auto program = random_program(GetParam());
  std::mt19937 random(GetParam() + 1000);
  for (const auto& hosts : {std::vector<int>{2, 1}, std::vector<int>{2, 3}, std::vector<int>{4}}) {
    Ranks ranks(program, hosts, random);
    ranks.differ_in_the_past();
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) ranks.run(rank, program.trace);
    ASSERT_TRUE(ranks.agree());
    const auto plans = ranks.plans();
    for (std::size_t rank = 1; rank < ranks.size(); ++rank) {
      if (ranks.host_of(rank) == ranks.host_of(rank - 1)) {
        ASSERT_EQ(plans[rank], plans[rank - 1]) << "ranks " << rank - 1 << " and " << rank;
      }
    }
    // One rank touches something else: one touch less, one more, two in the other order.
    auto other = program.trace;
    const auto at = other.empty() ? 0 : random() % other.size();
    if (other.size() < 2 || random() % 3 == 0)
      other.insert(other.begin() + static_cast<std::ptrdiff_t>(at), static_cast<int>(random() % program.parameters.size()));
    else if (random() % 2)
      other.erase(other.begin() + static_cast<std::ptrdiff_t>(at));
    else
      std::swap(other[at], other[at ? at - 1 : 1]);
    other.erase(std::unique(other.begin(), other.end()), other.end());
    const auto odd = random() % ranks.size();
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) ranks.run(rank, rank == odd ? other : program.trace);
    ASSERT_EQ(ranks.agree(), ranks.size() == 1 || other == program.trace);
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
