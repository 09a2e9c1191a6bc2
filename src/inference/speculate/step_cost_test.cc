#include "inference/speculate/step_cost.h"

#include <gtest/gtest.h>

#include <random>

namespace unshard::inference {
namespace {

using Chances = std::vector<std::vector<double>>;
using Counts = std::vector<std::int64_t>;

Counts guesses_that_pay(const Chances& chances, std::int64_t rows, std::int64_t room, const StepCost& target, const StepCost* draft,
                        std::int64_t first_rows = 1) {
  std::vector<Outlook> sequences;
  for (const auto& each : chances) sequences.push_back({each, first_rows});
  return unshard::inference::guesses_that_pay(sequences, rows, room, target, draft).guesses;
}

TEST(StepCost, IsStraightBetweenMeasuredPointsAndBeyondThem) {
  const StepCost cost({{1, 10}, {2, 12}, {4, 20}});
  EXPECT_DOUBLE_EQ(cost.seconds(1), 10);
  EXPECT_DOUBLE_EQ(cost.seconds(2), 12);
  EXPECT_DOUBLE_EQ(cost.seconds(3), 16);
  EXPECT_DOUBLE_EQ(cost.seconds(6), 28);
  EXPECT_DOUBLE_EQ(StepCost({{1, 5}}).seconds(9), 5);
}

TEST(StepCost, NeverFalls) { EXPECT_DOUBLE_EQ(StepCost({{1, 10}, {2, 8}, {4, 9}}).seconds(4), 10); }

TEST(StepCost, FollowsTheStepsThatAreMade) {
  StepCost cost({{1, 1}, {2, 1}, {4, 1}});
  for (int i = 0; i < 600; ++i) cost.observe(1, 3), cost.observe(2, 6);  // three times as slow, and a second row doubles it
  EXPECT_NEAR(cost.seconds(1), 3, 0.1);
  EXPECT_NEAR(cost.seconds(2), 6, 0.2);
  EXPECT_GE(cost.seconds(4), cost.seconds(2));
}

TEST(StepCost, TakesALoadedMachineForOneThatIsSlowerWhateverTheRows) {
  StepCost cost({{1, 1}, {2, 1.2}, {4, 1.6}});
  for (int i = 0; i < 30; ++i) cost.observe(1, 2);
  EXPECT_NEAR(cost.seconds(1), 2, 0.2);
  EXPECT_GT(cost.seconds(4) / cost.seconds(1), 1.2);
}

TEST(GuessesThatPay, AllWhereRowsCostNothingAndNoneWhereTheyCostTheirFullShare) {
  const Chances chances{{0.9, 0.8, 0.7}, {0.2, 0.1}};
  EXPECT_EQ(guesses_that_pay(chances, 2, 100, StepCost({{1, 1}}), nullptr), (Counts{3, 2}));
  EXPECT_EQ(guesses_that_pay(chances, 2, 100, StepCost({{1, 1}, {2, 2}}), nullptr), (Counts{0, 0}));
}

TEST(GuessesThatPay, StopWhereAGuessIsWorthLessThanItsRow) {
  // A row takes a tenth of a step of one: a guess must be right more often than (tokens so far) / (10 + rows so far).
  EXPECT_EQ(guesses_that_pay(Chances{{0.5, 0.25, 0.12, 0.06}}, 1, 100, StepCost({{1, 1}, {2, 1.1}}), nullptr), (Counts{2}));
}

TEST(GuessesThatPay, AreTheLikeliestThatFit) {
  EXPECT_EQ(guesses_that_pay(Chances{{0.9, 0.5}, {0.8, 0.7}}, 2, 3, StepCost({{1, 1}}), nullptr), (Counts{1, 2}));
  EXPECT_EQ(guesses_that_pay(Chances{{0.9}, {}}, 2, 0, StepCost({{1, 1}}), nullptr), (Counts{0, 0}));
}

TEST(GuessesThatPay, PassAPriceThatFallsLater) {
  // The second row takes as long as a step, those after it nothing: two guesses lose what four win.
  const StepCost cost({{1, 1}, {2, 2}, {8, 2}});
  EXPECT_EQ(guesses_that_pay(Chances{{0.9, 0.8}}, 1, 100, cost, nullptr), (Counts{2}));
  EXPECT_EQ(guesses_that_pay(Chances{{0.5, 0.25}}, 1, 100, cost, nullptr), (Counts{0}));
}

TEST(GuessesThatPay, CountWhatTheDraftTakes) {
  const Chances chances{{0.9, 0.81, 0.73}};
  EXPECT_EQ(guesses_that_pay(chances, 1, 100, StepCost({{1, 1}}), nullptr), (Counts{3}));
  const StepCost slow({{1, 1}}), fast({{1, 0.1}});
  EXPECT_EQ(guesses_that_pay(chances, 1, 100, StepCost({{1, 1}}), &slow), (Counts{0}));
  EXPECT_EQ(guesses_that_pay(chances, 1, 100, StepCost({{1, 1}}), &fast), (Counts{3}));
  const StepCost by_rows({{1, 0.1}, {2, 0.2}});
  EXPECT_EQ(guesses_that_pay(chances, 1, 100, StepCost({{1, 1}}), &by_rows), (Counts{3}));
  EXPECT_EQ(guesses_that_pay(chances, 1, 100, StepCost({{1, 1}}), &by_rows, 40), (Counts{0}));  // it is far behind
}

TEST(GuessesThatPay, TakeADraftToBeSlowedDownAsItsTargetIs) {
  const StepCost draft({{1, 0.4}});
  StepCost target({{1, 1}});
  EXPECT_EQ(guesses_that_pay(Chances{{0.5}}, 1, 1, target, &draft), (Counts{1}));
  for (int i = 0; i < 200; ++i) target.observe(1, 5);  // five times as long; with a draft that isn't, 1.39 would be won
  const std::vector<Outlook> sequence{{{0.5}, 1}};
  EXPECT_LT(unshard::inference::guesses_that_pay(sequence, 1, 1, target, &draft).gain, 1.25);
}

TEST(GuessesThatPay, SayWhatTheyGain) {
  const std::vector<Outlook> sequence{{{0.5}, 1}};
  EXPECT_DOUBLE_EQ(unshard::inference::guesses_that_pay(sequence, 1, 1, StepCost({{1, 1}, {2, 1.25}}), nullptr).gain, 1.2);
  EXPECT_DOUBLE_EQ(unshard::inference::guesses_that_pay(sequence, 1, 1, StepCost({{1, 1}, {2, 2}}), nullptr).gain, 1);
}

/// No other choice of guesses makes more tokens a second.
TEST(GuessesThatPay, AreTheBestOfAllChoices) {
  std::mt19937 random(3);
  std::uniform_real_distribution<double> uniform(0, 1);
  for (int round = 0; round < 200; ++round) {
    Chances chances(2);
    for (auto& of_sequence : chances)
      for (double chance = 1; of_sequence.size() < 3;) of_sequence.push_back(chance *= uniform(random));
    const StepCost cost({{1, 1}, {2, 1 + uniform(random) / 2}, {4, 1.5 + uniform(random)}, {8, 2.5 + uniform(random)}});
    const auto speed = [&](std::int64_t first, std::int64_t second) {
      double tokens = 2;
      for (std::int64_t i = 0; i < first; ++i) tokens += chances[0][static_cast<std::size_t>(i)];
      for (std::int64_t i = 0; i < second; ++i) tokens += chances[1][static_cast<std::size_t>(i)];
      return tokens / cost.seconds(2 + first + second);
    };
    const auto found = guesses_that_pay(chances, 2, 100, cost, nullptr);
    for (std::int64_t first = 0; first <= 3; ++first)
      for (std::int64_t second = 0; second <= 3; ++second)
        EXPECT_LE(speed(first, second), std::max(speed(found[0], found[1]), 1.05 * speed(0, 0)) * (1 + 1e-12));
  }
}

}  // namespace
}  // namespace unshard::inference
