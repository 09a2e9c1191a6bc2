// Facts about one choice.
#include "inference/sample/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <stdexcept>

#include "inference/sample/exact_distribution.h"
#include "inference/sample/random.h"

namespace unshard::inference {
namespace {

using ::testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

SamplingOptions greedy(std::int64_t logprobs = -1) {
  SamplingOptions options;
  options.temperature = 0;
  options.logprobs = logprobs;
  return options;
}
std::vector<float> random_logits(std::size_t n, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> logits(n);
  for (auto& logit : logits) logit = normal(random);
  return logits;
}
Choice choose_once(const SamplingOptions& options, std::vector<float> logits, const std::vector<std::uint32_t>& allowed = {},
                   std::uint64_t seed = 1) {
  Sampler sampler(static_cast<std::int64_t>(logits.size()));
  SamplerState state(options, seed, {});
  return sampler.choose(state, logits, allowed);
}
std::string error_of(std::vector<float> logits, const std::vector<std::uint32_t>& allowed = {}, const SamplingOptions& options = greedy()) {
  try {
    choose_once(options, std::move(logits), allowed);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(Sampler, GreedyIsTheLargestLogitForEverySize) {
  for (std::size_t n = 1; n < 4000; n += n < 70 ? 1 : 97) {
    const auto logits = random_logits(n, static_cast<std::uint32_t>(n));
    EXPECT_EQ(choose_once(greedy(), logits).token, std::max_element(logits.begin(), logits.end()) - logits.begin());
  }
}

TEST(Sampler, GreedyTakesTheLowestIdAmongEquals) {
  std::vector<float> logits(3000, -1);
  for (const std::size_t at : {2999, 1500, 1499, 40}) {
    logits[at] = 7;
    EXPECT_EQ(choose_once(greedy(), logits).token, static_cast<Token>(at));
  }
  EXPECT_EQ(choose_once(greedy(), std::vector<float>(3000, -2)).token, 0);
}

TEST(Sampler, ABadLogitIsNamed) {
  SamplingOptions warm;
  for (const std::size_t n : {5, 100, 3000}) {
    for (const std::size_t at : {std::size_t{0}, n / 2, n - 1}) {
      auto logits = random_logits(n, 1);
      logits[at] = std::nanf("");
      EXPECT_THAT(error_of(logits), HasSubstr("token " + std::to_string(at) + " is NaN"));
      EXPECT_THAT(error_of(logits, {}, warm), HasSubstr("token " + std::to_string(at) + " is NaN"));
      logits[at] = kInfinity;
      EXPECT_THAT(error_of(logits), HasSubstr("token " + std::to_string(at) + " is infinite"));
    }
  }
}

TEST(Sampler, NoTokenLeftIsAnErrorThatChangesNothing) {
  EXPECT_THAT(error_of(std::vector<float>(40, -kInfinity)), HasSubstr("no token is allowed"));
  EXPECT_THAT(error_of(random_logits(40, 1), {0, 0}), HasSubstr("no token is allowed"));
  SamplingOptions options;
  Sampler sampler(40);
  SamplerState failed(options, 5, {}), fresh(options, 5, {});
  auto logits = random_logits(40, 1), same = logits, again = logits;
  EXPECT_THROW(sampler.choose(failed, logits, std::vector<std::uint32_t>{0, 0}), std::runtime_error);
  EXPECT_EQ(sampler.choose(failed, same, {}).token, sampler.choose(fresh, again, {}).token);
}

TEST(Sampler, WrongSizesAreRefused) {
  Sampler sampler(40);
  SamplerState state(greedy(), 1, {});
  std::vector<float> few(39), right(40);
  EXPECT_THROW(sampler.choose(state, few, {}), std::invalid_argument);
  EXPECT_THROW(sampler.choose(state, right, std::vector<std::uint32_t>(1, ~0U)), std::invalid_argument);
  EXPECT_THROW(Sampler(0), std::invalid_argument);
  auto biased = greedy();
  biased.logit_bias = {{40, 1.0F}};
  SamplerState outside(biased, 1, {});
  EXPECT_THROW(sampler.choose(outside, right, {}), std::invalid_argument);
}

TEST(Sampler, OnlyAllowedTokensComeAtAnyTemperature) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    const std::size_t n = 1 + random() % 200;
    std::vector<std::uint32_t> allowed((n + 31) / 32);
    for (auto& word : allowed) word = static_cast<std::uint32_t>(random() & random());
    allowed[(n - 1) / 32] |= 1U << ((n - 1) % 32);
    SamplingOptions options;
    options.temperature = round % 3;
    options.top_k = round % 5;
    options.top_p = round % 2 ? 0.9 : 1;
    const auto token = static_cast<std::size_t>(choose_once(options, random_logits(n, static_cast<std::uint32_t>(round)), allowed).token);
    ASSERT_TRUE(allowed[token / 32] >> (token % 32) & 1) << token << " of " << n;
  }
}

TEST(Sampler, TheSameSeedDrawsTheSameTokensWhateverRunsBeside) {
  SamplingOptions options;
  options.top_p = 0.95;
  options.presence_penalty = 0.5;
  const auto alone = [&](std::uint64_t seed) {
    Sampler sampler(500);
    SamplerState state(options, seed, {});
    std::vector<Token> tokens;
    for (std::uint32_t i = 0; i < 50; ++i) {
      auto logits = random_logits(500, i);
      tokens.push_back(sampler.choose(state, logits, {}).token);
    }
    return tokens;
  };
  std::mt19937 random(9);
  Sampler one(500), other(500);
  std::vector<SamplerState> states;
  std::vector<std::vector<Token>> tokens(8);
  for (std::uint64_t seed = 0; seed < 8; ++seed) states.emplace_back(options, seed, std::vector<Token>{});
  for (std::size_t left = 8 * 50; left > 0;) {  // in any order, on either worker
    const std::size_t s = random() % 8;
    if (tokens[s].size() == 50) continue;
    auto logits = random_logits(500, static_cast<std::uint32_t>(tokens[s].size()));
    tokens[s].push_back((random() % 2 ? one : other).choose(states[s], logits, {}).token);
    --left;
  }
  for (std::uint64_t seed = 0; seed < 8; ++seed) EXPECT_EQ(tokens[seed], alone(seed)) << seed;
  EXPECT_NE(tokens[0], tokens[1]);
}

TEST(Sampler, LogprobsAreThoseOfTheDistributionBeforeFilterTemperatureAndCuts) {
  for (const std::size_t n : {3, 100, 5000}) {
    SamplingOptions options;
    options.temperature = 0.5;
    options.top_k = 2;
    options.logprobs = 20;
    options.logit_bias = {{1, 4.0F}};
    const auto logits = random_logits(n, 4);
    std::vector<std::uint32_t> allowed((n + 31) / 32, ~0U);
    auto plain = options;
    plain.temperature = 1;
    plain.top_k = 0;
    const auto p = exact_distribution(adjusted(logits, plain, {}, {}), plain, {});
    const auto best = static_cast<std::size_t>(std::max_element(p.begin(), p.end()) - p.begin());
    allowed[best / 32] &= ~(1U << (best % 32));
    const Choice choice = choose_once(options, logits, allowed);
    EXPECT_NE(static_cast<std::size_t>(choice.token), best);
    EXPECT_NEAR(choice.logprob, std::log(p[static_cast<std::size_t>(choice.token)]), 1e-5);
    ASSERT_EQ(choice.likeliest.size(), std::min<std::size_t>(n, 20));
    EXPECT_EQ(static_cast<std::size_t>(choice.likeliest[0].token), best);
    for (std::size_t i = 0; i < choice.likeliest.size(); ++i) {
      const auto& [token, logprob] = choice.likeliest[i];
      EXPECT_NEAR(logprob, std::log(p[static_cast<std::size_t>(token)]), 1e-5);
      EXPECT_LE(logprob, choice.likeliest[i > 0 ? i - 1 : 0].logprob);
      if (token == choice.token) {
        EXPECT_EQ(logprob, choice.logprob);
      }
    }
    const auto better =
        std::ranges::count_if(p, [&](double each) { return each > p[static_cast<std::size_t>(choice.likeliest.back().token)]; });
    EXPECT_EQ(better, static_cast<std::ptrdiff_t>(choice.likeliest.size()) - 1);
  }
}

TEST(Sampler, LogprobsAreReportedOnlyWhereAskedFor) {
  const auto none = choose_once(greedy(-1), random_logits(50, 1)), own = choose_once(greedy(0), random_logits(50, 1));
  EXPECT_EQ(none.logprob, 0);
  EXPECT_LT(own.logprob, 0);
  EXPECT_TRUE(none.likeliest.empty() && own.likeliest.empty());
  EXPECT_EQ(choose_once(greedy(60), random_logits(50, 1)).likeliest.size(), 50u);
}

TEST(Sampler, BiasAndPenaltiesChangeLogitsAsDocumented) {
  std::mt19937 random(1);
  for (int round = 0; round < 100; ++round) {
    auto options = greedy(30);
    options.repetition_penalty = round % 3 == 0 ? 1 : 0.5 + 0.1 * static_cast<double>(random() % 20);
    options.presence_penalty = round % 2 ? 0.7 : 0;
    options.frequency_penalty = round % 5 ? -0.4 : 0;
    options.logit_bias = {{3, -5.0F}, {3, 1.0F}, {8, 2.0F}};
    std::vector<Token> prompt(random() % 6), output;
    for (auto& token : prompt) token = static_cast<Token>(random() % 30);
    Sampler sampler(30);
    SamplerState state(options, 1, prompt);
    const auto logits = random_logits(30, static_cast<std::uint32_t>(round));
    SamplingOptions plain;
    for (int i = 0; i < 8; ++i) {
      auto work = logits;
      const auto wanted = adjusted(logits, options, prompt, output);
      const Choice choice = sampler.choose(state, work, {});
      EXPECT_EQ(choice.token, std::max_element(wanted.begin(), wanted.end()) - wanted.begin());
      const auto p = exact_distribution(wanted, plain, {});
      for (const auto& [token, logprob] : choice.likeliest) ASSERT_NEAR(logprob, std::log(p[static_cast<std::size_t>(token)]), 1e-5);
      output.push_back(choice.token);
    }
  }
}

TEST(Sampler, CutsTakeTheLowerIdAmongEqualsAndKeepOneAtLeast) {
  SamplingOptions top_k, top_p, tiny;
  top_k.top_k = 3;
  top_p.top_p = 0.5;
  tiny.top_p = 1e-12;
  const std::vector<float> equal(1000, 1.0F);
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    ASSERT_LT(choose_once(top_k, equal, {}, seed).token, 3);
    ASSERT_LT(choose_once(top_p, equal, {}, seed).token, 500);
    ASSERT_EQ(choose_once(tiny, equal, {}, seed).token, 0);
  }
}

TEST(Sampler, ExtremeTemperaturesAndLogitsStayDefined) {
  auto logits = random_logits(2000, 1);
  logits[77] = 3e38F;
  logits[5] = -kInfinity;
  logits[6] = -3e38F;
  for (const double temperature : {1e-300, 1e-30, 1e-3, 1.0, 1e3}) {
    SamplingOptions options;
    options.temperature = temperature;
    EXPECT_EQ(choose_once(options, logits).token, 77) << temperature;
    options.top_p = 0.9;
    EXPECT_EQ(choose_once(options, logits).token, 77) << temperature;
  }
  SamplingOptions hot;  // all but -inf about equally likely
  hot.temperature = 1e9;
  const auto token = choose_once(hot, random_logits(2000, 1)).token;
  EXPECT_TRUE(token >= 0 && token < 2000);
  std::vector<float> half(64, -kInfinity);
  for (std::size_t i = 32; i < 64; ++i) half[i] = 1;
  for (std::uint64_t seed = 0; seed < 100; ++seed) ASSERT_GE(choose_once(hot, half, {}, seed).token, 32);
}

TEST(UniformDraw, IsEvenOverCountersAndOverSeeds) {
  for (const bool over_seeds : {false, true}) {
    std::vector<std::int64_t> counts(1000);
    for (std::uint64_t i = 0; i < 100000; ++i) {
      const double u = over_seeds ? uniform_draw(i, 0) : uniform_draw(7, i);
      ASSERT_TRUE(u >= 0 && u < 1);
      ++counts[static_cast<std::size_t>(u * 1000)];
    }
    const double deviation = chi_square_deviation(counts, std::vector<double>(1000, 1e-3));
    EXPECT_LT(std::abs(deviation), 4.5) << over_seeds;  // too even would be as wrong
  }
}

}  // namespace
}  // namespace unshard::inference
