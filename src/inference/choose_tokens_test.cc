// Choosing with guesses is choosing without them, for every way of guessing; and its distribution is exact.
#include "inference/choose_tokens.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "inference/sample/exact_distribution.h"

namespace unshard::inference {
namespace {

constexpr std::int64_t kVocab = 12;
constexpr Token kEnd = 11;

/// A model: the logits after a prompt and the tokens generated since depend on the last two of these.
std::vector<float> model(const std::vector<Token>& generated) {
  std::uint32_t seed = 7;
  for (std::size_t i = generated.size() < 2 ? 0 : generated.size() - 2; i < generated.size(); ++i)
    seed = seed * 31 + static_cast<std::uint32_t>(generated[i]) + 1;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 1.5F);
  std::vector<float> logits(kVocab);
  for (auto& logit : logits) logit = normal(random);
  return logits;
}

using Guess = std::function<std::vector<Token>(const Generation&)>;

struct Answer {
  std::vector<Token> tokens;
  std::vector<float> logprobs;
  Finish finish = Finish::none;
  std::string error;
  std::int64_t steps = 0, accepted = 0;
  bool operator==(const Answer& other) const {
    return tokens == other.tokens && logprobs == other.logprobs && finish == other.finish && error == other.error;
  }
};

class Chooser {
 public:
  explicit Chooser(std::int64_t threads = 1) : workers_(threads, false), chooser_(kVocab, {kEnd}, workers_) {}

  /// Step after step, several sequences together, each with its own way of guessing.
  std::vector<Answer> run(const RequestOptions& options, const std::vector<std::uint64_t>& seeds, const Guess& guess,
                          const std::shared_ptr<TokenFilter>& filter = nullptr) {
    const auto shared = std::make_shared<const RequestOptions>(options);
    std::vector<Generation> generations;
    for (const auto seed : seeds) generations.push_back({shared, filter, SamplerState(options.sampling, seed, {}), {}});
    std::vector<Answer> answers(seeds.size());
    for (bool more = true; more;) {
      more = false;
      std::vector<std::vector<Token>> guesses(seeds.size());
      std::vector<Draw> draws;
      std::vector<std::size_t> which;
      std::vector<float> logits;
      for (std::size_t i = 0; i < seeds.size(); ++i) {
        if (answers[i].finish != Finish::none || !answers[i].error.empty()) continue;
        guesses[i] = guess(generations[i]);
        auto tokens = generations[i].generated;
        for (std::size_t row = 0; row <= guesses[i].size(); ++row) {
          const auto more_logits = model(tokens);
          logits.insert(logits.end(), more_logits.begin(), more_logits.end());
          if (row < guesses[i].size()) tokens.push_back(guesses[i][row]);
        }
        draws.push_back({&generations[i], guesses[i], {}, Finish::none, {}});
        which.push_back(i);
      }
      chooser_.choose(draws, logits);
      for (std::size_t d = 0; d < draws.size(); ++d) {
        auto& answer = answers[which[d]];
        for (const auto& choice : draws[d].choices) {
          answer.tokens.push_back(choice.token);
          answer.logprobs.push_back(choice.logprob);
        }
        answer.finish = draws[d].finish;
        answer.error = draws[d].error;
        ++answer.steps;
        answer.accepted += static_cast<std::int64_t>(draws[d].choices.size()) - 1;
        EXPECT_EQ(generations[which[d]].generated, answer.tokens);
        more = more || (answer.finish == Finish::none && answer.error.empty());
      }
    }
    return answers;
  }

 private:
  Workers workers_;
  TokenChooser chooser_;
};

std::vector<Token> nothing(const Generation&) { return {}; }

/// Some right and some wrong: the likeliest token of each place, but now and then another.
std::vector<Token> likeliest(const Generation& generation) {
  auto tokens = generation.generated;
  std::vector<Token> guesses;
  for (std::size_t i = 0; i < 3; ++i) {
    const auto logits = model(tokens);
    guesses.push_back(static_cast<Token>(std::ranges::max_element(logits) - logits.begin()));
    if (tokens.size() % 5 == 4) guesses.back() = (guesses.back() + 1) % kVocab;
    tokens.push_back(guesses.back());
  }
  return guesses;
}

std::vector<Token> foolish(const Generation& generation) { return {static_cast<Token>(generation.generated.size() % 11), 3, 5}; }

/// As a draft that equals its target guesses: with the random numbers of the sequence itself.
std::vector<Token> clairvoyant(const Generation& generation) {
  auto tokens = generation.generated;
  auto sampler = generation.sampler;
  Sampler scratch(kVocab);
  std::vector<Token> guesses;
  for (int i = 0; i < 4; ++i) {
    auto logits = model(tokens);
    guesses.push_back(scratch.choose(sampler, logits, {}).token);
    tokens.push_back(guesses.back());
  }
  return guesses;
}

std::vector<RequestOptions> requests() {
  std::vector<RequestOptions> result;
  for (const double temperature : {0.0, 0.7, 1.3}) {
    for (int kind = 0; kind < 4; ++kind) {
      RequestOptions options;
      options.max_tokens = 17;
      options.sampling.temperature = temperature;
      options.sampling.logprobs = 0;
      if (kind == 1) options.sampling.top_p = 0.8, options.sampling.top_k = 7, options.min_tokens = 9;
      if (kind == 2) options.sampling.repetition_penalty = 1.3, options.sampling.frequency_penalty = 0.5, options.ignore_eos = true;
      if (kind == 3) options.sampling.min_p = 0.1, options.sampling.logit_bias = {{3, 1.5F}, {kEnd, -1.0F}}, options.stop_tokens = {6};
      result.push_back(options);
    }
  }
  return result;
}

/// Lets two tokens come, then the end alone.
class TwoThenEnd : public TokenFilter {
 public:
  void restrict(std::span<const Token> generated, std::span<std::uint32_t> allowed) override {
    constexpr std::uint32_t kBeyond = ~std::uint32_t{0} << kVocab;  // bits of no token
    allowed[0] = generated.size() < 2 ? kBeyond | 0x30 : kBeyond | std::uint32_t{1} << kEnd;
  }
};

TEST(ChooseTokens, AFilterThatLeavesOnlyTheEndPrevailsOverMinTokens) {
  Chooser chooser;
  RequestOptions options;
  options.max_tokens = 9;
  options.min_tokens = 5;
  for (const auto& answer : chooser.run(options, {1, 2, 3}, nothing, std::make_shared<TwoThenEnd>())) {
    EXPECT_EQ(answer.error, "");
    EXPECT_EQ(answer.finish, Finish::stop);
    EXPECT_EQ(answer.tokens.size(), 3u);
  }
}

TEST(ChooseTokens, GuessesChangeNothing) {
  Chooser chooser(2);
  const std::vector<std::uint64_t> seeds{1, 2, 3, 4, 5, 6};
  for (const auto& options : requests()) {
    const auto wanted = chooser.run(options, seeds, nothing);
    std::int64_t accepted = 0;
    for (const auto& guess : {Guess(likeliest), Guess(foolish), Guess(clairvoyant)}) {
      const auto found = chooser.run(options, seeds, guess);
      EXPECT_EQ(found, wanted) << "temperature " << options.sampling.temperature;
      for (const auto& answer : found) accepted += answer.accepted;
      EXPECT_EQ(chooser.run(options, {seeds[3]}, guess)[0], wanted[3]);
    }
    EXPECT_GT(accepted, 0);
  }
}

TEST(ChooseTokens, AllGuessesOfADraftThatDrawsAlikeAreRight) {
  Chooser chooser;
  RequestOptions options;
  options.max_tokens = 25;
  options.ignore_eos = true;
  options.sampling.frequency_penalty = 0.3;
  for (const auto& answer : chooser.run(options, {1, 2, 3}, clairvoyant)) {
    EXPECT_EQ(answer.steps, 5);  // 4 guesses and a token of its own in each
    EXPECT_EQ(answer.accepted, 20);
  }
}

/// As a grammar's matcher: it must be told each token once, in order, and none that is rejected.
struct Matcher : TokenFilter {
  std::vector<Token> told;
  void restrict(std::span<const Token> generated, std::span<std::uint32_t> allowed) override {
    ASSERT_EQ(generated.size(), told.empty() && generated.empty() ? 0 : told.size() + 1);
    ASSERT_TRUE(std::ranges::equal(generated.first(told.size()), told));
    told.assign(generated.begin(), generated.end());
    if (told.size() == 13) throw std::runtime_error("enough");
    allowed[0] &= told.size() % 2 == 0 ? 0x555u : 0xaaau;
  }
};

TEST(ChooseTokens, AFilterIsToldTheTokensThatAreTrue) {
  Chooser chooser;
  RequestOptions options;
  options.max_tokens = 40;
  options.ignore_eos = true;
  for (const auto& guess : {Guess(nothing), Guess(likeliest), Guess(foolish)}) {
    const auto matcher = std::make_shared<Matcher>();
    const auto answer = chooser.run(options, {5}, guess, matcher)[0];
    EXPECT_EQ(answer.error, "enough");
    ASSERT_EQ(answer.tokens.size(), 13);
    EXPECT_EQ(answer.tokens, matcher->told);
    for (std::size_t i = 0; i < 13; ++i) EXPECT_EQ(answer.tokens[i] % 2, static_cast<Token>(i % 2));
    EXPECT_EQ(answer, chooser.run(options, {5}, nothing, std::make_shared<Matcher>())[0]);
  }
}

/// The joint distribution of two tokens, over seeds, with penalties that look at the first.
TEST(ChooseTokens, TwoTokensHaveTheirExactDistribution) {
  Chooser chooser;
  RequestOptions options;
  options.max_tokens = 2;
  options.ignore_eos = true;
  options.sampling.temperature = 0.9;
  options.sampling.top_k = 8;
  options.sampling.top_p = 0.95;
  options.sampling.presence_penalty = 0.7;
  options.sampling.repetition_penalty = 1.2;
  const auto& sampling = options.sampling;
  std::vector<double> p(kVocab * kVocab);
  const auto first = exact_distribution(adjusted(model({}), sampling, {}, {}), sampling, {});
  for (Token a = 0; a < kVocab; ++a) {
    const auto second = exact_distribution(adjusted(model({a}), sampling, {}, {a}), sampling, {});
    for (Token b = 0; b < kVocab; ++b)
      p[static_cast<std::size_t>(a * kVocab + b)] = first[static_cast<std::size_t>(a)] * second[static_cast<std::size_t>(b)];
  }
  std::vector<std::uint64_t> seeds(20000);
  std::uint64_t seed = 0;
  const auto likeliest_first = static_cast<std::size_t>(std::ranges::max_element(first) - first.begin());
  // A guess is right with its token's probability; the first is 0 where they are foolish.
  const std::vector<std::pair<Guess, double>> ways{
      {nothing, 0}, {likeliest, first[likeliest_first]}, {foolish, first[0]}, {clairvoyant, 1}};
  for (const auto& [guess, chance] : ways) {
    for (auto& each : seeds) each = ++seed;
    std::vector<std::int64_t> counts(kVocab * kVocab);
    std::int64_t accepted = 0;
    for (const auto& answer : chooser.run(options, seeds, guess)) {
      ++counts[static_cast<std::size_t>(answer.tokens[0] * kVocab + answer.tokens[1])];
      accepted += answer.accepted;
    }
    EXPECT_LT(chi_square_deviation(counts, p), 5);
    const auto draws = static_cast<double>(seeds.size());
    EXPECT_NEAR(static_cast<double>(accepted), chance * draws, 5 * std::sqrt(chance * (1 - chance) * draws) + 1e-9);
  }
}

}  // namespace
}  // namespace unshard::inference
