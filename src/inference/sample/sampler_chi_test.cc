// The sampler draws from the exact distribution: chi-square tests for many combinations of options.
//
// [Note: significance] Each test fails if the statistic lies 5 standard deviations above its expectation, which a right sampler does with
// probability 3e-7; about 200 tests with fixed seeds make 6e-5 that the file as written fails by chance, and it then does so always.
#include <gtest/gtest.h>

#include <random>

#include "inference/sample/exact_distribution.h"

namespace unshard::inference {
namespace {

constexpr double kDeviations = 5;

std::vector<float> random_logits(std::size_t n, float size, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, size);
  std::vector<float> logits(n);
  for (auto& logit : logits) logit = normal(random);
  return logits;
}

/// Draws one after another of one sequence.
std::vector<std::int64_t> draw_many(const std::vector<float>& logits, const SamplingOptions& options, int draws, std::uint64_t seed) {
  Sampler sampler(static_cast<std::int64_t>(logits.size()));
  SamplerState state(options, seed, {});
  std::vector<std::int64_t> counts(logits.size());
  std::vector<float> work;
  for (int i = 0; i < draws; ++i) {
    work = logits;
    ++counts[static_cast<std::size_t>(sampler.choose(state, work, {}).token)];
  }
  return counts;
}

std::string name_of(const SamplingOptions& o) {
  return "temperature " + std::to_string(o.temperature) + " top_k " + std::to_string(o.top_k) + " top_p " + std::to_string(o.top_p) +
         " min_p " + std::to_string(o.min_p);
}

std::vector<SamplingOptions> combinations() {
  std::vector<SamplingOptions> result;
  for (const double temperature : {0.3, 1.0, 2.5}) {
    for (const std::int64_t top_k : {0, 1, 5, 40}) {
      for (const double top_p : {1.0, 0.9, 0.4}) {
        for (const double min_p : {0.0, 0.1}) {
          SamplingOptions options;
          options.temperature = temperature;
          options.top_k = top_k;
          options.top_p = top_p;
          options.min_p = min_p;
          result.push_back(options);
        }
      }
    }
  }
  return result;
}

TEST(SamplerDistribution, IsExactForEveryCombinationOfCuts) {
  const auto logits = random_logits(60, 1.5F, 1);
  std::uint64_t seed = 0;
  for (const auto& options : combinations()) {
    const auto p = exact_distribution(adjusted(logits, options, {}, {}), options, {});
    EXPECT_LT(chi_square_deviation(draw_many(logits, options, 3000, ++seed), p), kDeviations) << name_of(options);
  }
}

TEST(SamplerDistribution, IsExactOverSeedsWithBiasPenaltiesAndFilterToo) {
  const auto logits = random_logits(60, 1.5F, 2);
  const std::vector<Token> prompt{1, 2, 3, 3, 40}, output{3, 4, 4, 4, 50};
  std::vector<bool> allowed(60);
  std::vector<std::uint32_t> bits(2);
  for (std::size_t i = 0; i < 60; ++i) {
    allowed[i] = i % 3 != 0;
    if (allowed[i]) bits[i / 32] |= 1U << (i % 32);
  }
  Sampler sampler(60);
  std::vector<float> work;
  std::uint64_t seed = 0;
  for (auto options : combinations()) {
    options.logit_bias = {{5, 1.5F}, {7, -2.0F}, {4, 3.0F}};
    options.repetition_penalty = 1.3;
    options.presence_penalty = 0.4;
    options.frequency_penalty = -0.3;
    std::vector<std::int64_t> counts(60);
    for (int i = 0; i < 2000; ++i) {
      SamplerState state(options, ++seed, prompt);
      for (const Token token : output) {  // a filter that allows one token makes it the output
        std::vector<std::uint32_t> only(2);
        only[static_cast<std::size_t>(token / 32)] = 1U << (token % 32);
        work = logits;
        ASSERT_EQ(sampler.choose(state, work, only).token, token);
      }
      work = logits;
      ++counts[static_cast<std::size_t>(sampler.choose(state, work, bits).token)];
    }
    const auto p = exact_distribution(adjusted(logits, options, prompt, output), options, allowed);
    EXPECT_LT(chi_square_deviation(counts, p), kDeviations) << name_of(options);
  }
}

TEST(SamplerDistribution, IsExactForLargeVocabulariesAndManyCandidates) {
  const auto logits = random_logits(3000, 1, 3);
  SamplingOptions plain, top_p, top_k, both, min_p;
  top_p.top_p = 0.8;
  top_k.top_k = 1500;
  both.top_k = 2500;
  both.top_p = 0.7;
  min_p.min_p = 0.05;
  std::uint64_t seed = 100;
  for (const auto& options : {plain, top_p, top_k, both, min_p}) {
    const auto p = exact_distribution(adjusted(logits, options, {}, {}), options, {});
    EXPECT_LT(chi_square_deviation(draw_many(logits, options, 8000, ++seed), p), kDeviations) << name_of(options);
  }
}

TEST(SamplerDistribution, TheTestFindsASlightlyWrongTemperature) {
  const auto logits = random_logits(60, 1.5F, 1);
  SamplingOptions drawn, other;
  other.temperature = 1.15;
  EXPECT_GT(chi_square_deviation(draw_many(logits, drawn, 20000, 1), exact_distribution(adjusted(logits, other, {}, {}), other, {})),
            kDeviations);
}

}  // namespace
}  // namespace unshard::inference
