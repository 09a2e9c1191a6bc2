// Where ranks are in a plan that they share, when steps and passes begin at different times and not equally often.
#include "zero/plan_follower.h"

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <thread>

#include "unshard/comm/host_group.h"

namespace unshard::zero {
namespace {

constexpr std::size_t kEval = 1;

/// Two ranks of a host, moved by hand, that follow one plan of four touches, each gathered when the one before it has begun.
class PlanFollowers : public testing::Test {
 protected:
  PlanFollowers() : groups_(HostGroup::in_process(2, {})) {
    std::array<std::thread, 2> threads;
    for (std::size_t rank = 0; rank < 2; ++rank)
      threads[rank] = std::thread([&, rank] { copies_[rank] = std::make_unique<HostCopy>(*groups_[rank]); });
    for (auto& thread : threads) thread.join();
    for (std::size_t rank = 0; rank < 2; ++rank) {
      followers_[rank] = std::make_unique<PlanFollower>(*copies_[rank], kEval);
      followers_[rank]->set_plan(make_plan({0, 1, 2, 3}, std::vector<PlanParameter>(4, {10, 10, 40}), {40, 10, 1000, 0}));
      followers_[rank]->set_agreed(true);
      followers_[rank]->begin_step();
    }
  }
  std::vector<std::size_t> taken(PlanFollower& follower) {
    std::vector<std::size_t> all;
    while (const auto index = follower.take()) all.push_back(*index);
    return all;
  }
  static std::vector<std::size_t> positions(PlanFollower& follower) {
    const auto all = follower.positions();
    return {all.begin(), all.end()};
  }
  using Indices = std::vector<std::size_t>;

  std::vector<std::shared_ptr<HostGroup>> groups_;
  std::array<std::unique_ptr<HostCopy>, 2> copies_;
  std::array<std::unique_ptr<PlanFollower>, 2> followers_;
};

TEST_F(PlanFollowers, ShareAPassesGathers) {
  auto& [first, second] = followers_;
  first->begin_pass();
  EXPECT_EQ(taken(*first), Indices{0});
  EXPECT_EQ(positions(*first), (Indices{0, 0})) << "the second has yet to begin";
  second->begin_pass();
  EXPECT_EQ(taken(*second), Indices{}) << "the first has taken it";
  second->moved(1);
  EXPECT_EQ(taken(*first), Indices{1});
  EXPECT_EQ(taken(*second), Indices{});
}

TEST_F(PlanFollowers, WhoIsAPassAheadOrHasLeftIsNotCountedAsSlow) {
  auto& [first, second] = followers_;
  for (auto& follower : followers_) follower->begin_pass();
  first->moved(4);
  first->begin_pass();
  second->moved(2);
  EXPECT_EQ(positions(*second), Indices{2});
  EXPECT_EQ(positions(*first), (Indices{0, 0})) << "a pass behind";
  second->leave();
  EXPECT_EQ(positions(*first), Indices{0});
}

TEST_F(PlanFollowers, AreTogetherAgainInTheNextStepHoweverManyPassesEachHadBefore) {
  auto& [first, second] = followers_;
  for (int i = 0; i < 5; ++i) first->begin_pass();
  first->leave();
  for (auto& follower : followers_) follower->begin_step();
  for (auto& follower : followers_) follower->begin_pass();
  first->moved(1);
  second->moved(2);
  EXPECT_EQ(positions(*first), (Indices{1, 2}));
  EXPECT_EQ(positions(*second), (Indices{1, 2}));
  EXPECT_EQ(taken(*first), (Indices{1, 2}));
}

TEST_F(PlanFollowers, ResumedWorkTakesAgainWhatLiesAheadOfIt) {
  auto& first = followers_[0];
  first->begin_pass();
  first->moved(1);
  EXPECT_EQ(taken(*first), (Indices{0, 1}));
  first->resume();  // what was brought in for touch 1 may have been let go
  EXPECT_EQ(taken(*first), Indices{1});
}

TEST_F(PlanFollowers, PassesWithoutEndDoNotReachTheNextStep) {
  auto& [first, second] = followers_;
  for (int i = 0; i < (1 << 20) + 5; ++i) first->begin_pass();
  second->begin_step();
  EXPECT_EQ(positions(*second), (Indices{0, 0})) << "the first is still in the step before";
}

}  // namespace
}  // namespace unshard::zero
