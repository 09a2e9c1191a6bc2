// What one choice costs, by options, for logits like a model's (a few likely tokens) and for flat ones (the worst case of top_p).
//
//   sampler_bench [vocab]        49152 unless given
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "inference/sample/sampler.h"
#include "unshard/core/flat_math.h"

namespace {

using namespace unshard::inference;

struct Case {
  const char* name;
  SamplingOptions options;
  bool filter = false;
};

std::vector<Case> cases() {
  std::vector<Case> result;
  const auto add = [&](const char* name, double temperature, auto set) {
    result.push_back({name, {}});
    result.back().options.temperature = temperature;
    set(result.back().options);
  };
  add("greedy", 0, [](auto&) {});
  add("temperature 0.8", 0.8, [](auto&) {});
  add("top_k 50", 1, [](auto& o) { o.top_k = 50; });
  add("top_k 50, top_p 0.9", 1, [](auto& o) { o.top_k = 50, o.top_p = 0.9; });
  add("top_k 5000", 1, [](auto& o) { o.top_k = 5000; });
  add("top_p 0.95", 1, [](auto& o) { o.top_p = 0.95; });
  add("min_p 0.05", 1, [](auto& o) { o.min_p = 0.05; });
  add("greedy, 5 logprobs", 0, [](auto& o) { o.logprobs = 5; });
  add("temperature 0.8, 20 logprobs", 0.8, [](auto& o) { o.logprobs = 20; });
  add("greedy, penalties, prompt of 1,000 tokens", 0, [](auto& o) { o.repetition_penalty = 1.1, o.presence_penalty = 0.5; });
  add("greedy, filter", 0, [](auto&) {});
  result.back().filter = true;
  return result;
}

/// Zipf-like probabilities in random order, of entropy about that of text; or normal logits of deviation 1.
std::vector<float> logits_of(std::int64_t vocab, bool peaked) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> logits(static_cast<std::size_t>(vocab));
  for (std::size_t i = 0; i < logits.size(); ++i) {
    logits[i] = peaked ? -1.5F * std::log(1 + static_cast<float>(i)) + 0.3F * normal(random) : normal(random);
  }
  std::shuffle(logits.begin(), logits.end(), random);
  return logits;
}

/// Median microseconds of choose(), without the copy of the logits that comes before.
double measure(const Case& c, const std::vector<float>& logits) {
  const auto vocab = static_cast<std::int64_t>(logits.size());
  Sampler sampler(vocab);
  std::vector<Token> prompt(1000);
  std::mt19937 random(2);
  for (auto& token : prompt) token = static_cast<Token>(random() % logits.size());
  SamplerState state(c.options, 1, prompt);
  std::vector<std::uint32_t> allowed(c.filter ? (logits.size() + 31) / 32 : 0);
  for (auto& word : allowed) word = static_cast<std::uint32_t>(random());
  std::vector<double> times;
  std::vector<float> work;
  for (int i = 0; i < 300; ++i) {
    work = logits;
    const auto begin = std::chrono::steady_clock::now();
    sampler.choose(state, work, allowed);
    times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
  }
  std::nth_element(times.begin(), times.begin() + 150, times.end());
  return times[150];
}

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t vocab = argc > 1 ? std::atoll(argv[1]) : 49152;
  std::printf("# %s, vocab %lld, median us of one choice       like a model's       flat\n", unshard::kernels::isa(),
              static_cast<long long>(vocab));
  const auto peaked = logits_of(vocab, true), flat = logits_of(vocab, false);
  for (const auto& c : cases()) std::printf("%-48s %14.1f %10.1f\n", c.name, measure(c, peaked), measure(c, flat));
}
