// [Note: a choice, in order]
//  1. logit += bias
//  2. repetition penalty on tokens of prompt or output (positive logits divided by it, others multiplied), then
//     logit -= frequency_penalty * count in the output + presence_penalty (if it is there)
//  3. log-probabilities, if asked for: of softmax(logits) as they are now
//  4. filter: what it doesn't allow is out
//  5. temperature 0: the largest logit, the lowest id among equals. Else probabilities are softmax(logits / temperature) and
//  6. top_k: the k likeliest (the lower id among equals)
//  7. top_p: of these, renormalised, the fewest likeliest whose sum is at least top_p (sums are good to about 1e-6)
//  8. min_p: of these, those whose logit is at least largest + temperature * log(min_p)
//  9. the token at which the running sum of probabilities exceeds the sequence's next uniform number
// A greedy choice reads the logits once, one at a temperature twice; cuts look again only at chunks that hold large logits.
#include "inference/sample/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/cpu_isa.h"
#include "inference/sample/candidates.h"
#include "inference/sample/draw.h"
#include "inference/sample/sampler_work.h"
#include "unshard/core/error.h"

namespace unshard::inference {
namespace {

const SampleKernels& table() { return kernels::select_table(sample_kernels_portable, sample_kernels_avx2, sample_kernels_avx512); }

constexpr float kLowest = std::numeric_limits<float>::lowest();

/// 1 / temperature, small enough that 0 times it is 0.
float scale_of(double temperature) { return static_cast<float>(std::min(1 / temperature, 1e30)); }

}  // namespace

struct Sampler::Impl {
  explicit Impl(std::int64_t vocab)
      : vocab(vocab),
        kernels(table()),
        maxima(static_cast<std::size_t>(sample_chunks(vocab) * kSampleLanes)),
        sums(static_cast<std::size_t>(sample_chunks(vocab))),
        chunk(static_cast<std::size_t>(kSampleChunk)),
        candidates(kernels, vocab) {}

  /// Maxima of lanes and of all. \throws if a logit is NaN or infinite, or all are out
  void scan(std::span<float> logits, const std::uint32_t* allowed);
  [[noreturn]] void refuse(std::span<const float> logits) const;
  double sum_exp(std::span<const float> logits, float scale);
  void report(const SamplingOptions& options, std::span<const float> logits, Choice& choice);
  Token choose(const SamplerState& state, std::span<const float> logits);
  void cut(const SamplingOptions& options, std::span<const float> logits, float scale);
  Token draw_from_all(std::span<const float> logits, float scale, double u);

  std::int64_t vocab;
  const SampleKernels& kernels;
  std::vector<float> maxima;
  std::vector<double> sums;  ///< a chunk each
  std::vector<float> chunk;  ///< weights of one
  Candidates candidates;
  float largest = 0;
  double normaliser = 0;
};

void Sampler::Impl::scan(std::span<float> logits, const std::uint32_t* allowed) {
  const bool nan = kernels.scan(logits.data(), vocab, allowed, maxima.data());
  largest = *std::max_element(maxima.begin(), maxima.end());
  if (nan || !std::isfinite(largest)) refuse(logits);
}

void Sampler::Impl::refuse(std::span<const float> logits) const {
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i]) || logits[i] == std::numeric_limits<float>::infinity()) {
      throw std::runtime_error(cat("[inference.sample] the logit of token ", i, " is ", std::isnan(logits[i]) ? "NaN" : "infinite",
                                   "; the model's weights or its number format are broken"));
    }
  }
  throw std::runtime_error("[inference.sample] no token is allowed; the filter or the model leaves none of the vocabulary");
}

/// Of every logit; leaves chunks' sums in `sums`.
double Sampler::Impl::sum_exp(std::span<const float> logits, float scale) {
  kernels.sum_exp(logits.data(), vocab, largest, scale, sums.data());
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

/// Log-probabilities of the likeliest, and the normaliser for that of the token, which isn't known yet.
void Sampler::Impl::report(const SamplingOptions& options, std::span<const float> logits, Choice& choice) {
  normaliser = largest + std::log(sum_exp(logits, 1));
  const std::int64_t wanted = std::min(options.logprobs, vocab);
  if (wanted <= 0) return;
  candidates.gather_best(logits.data(), vocab, maxima.data(), wanted, largest, 0);
  candidates.keep_count(wanted);
  candidates.sort();
  for (std::int64_t i = 0; i < candidates.count(); ++i) {
    choice.likeliest.push_back({candidates.id(i), static_cast<float>(candidates.value(i) - normaliser)});
  }
}

/// Leave the candidates of steps 6 to 8.
void Sampler::Impl::cut(const SamplingOptions& o, std::span<const float> logits, float scale) {
  const float min_p_logit = o.min_p > 0 ? static_cast<float>(largest + std::log(o.min_p) / scale) : kLowest;
  if (o.top_k > 0 && o.top_k < vocab) {
    candidates.gather_best(logits.data(), vocab, maxima.data(), o.top_k, largest, scale);
    candidates.keep_count(o.top_k);
    if (o.top_p < 1) candidates.keep_mass(o.top_p * candidates.mass());
  } else if (o.top_p < 1) {
    // Tokens of a probability below (1 - top_p) / vocab sum up to less than 1 - top_p: the others reach top_p without them.
    const double total = sum_exp(logits, scale), least = std::log((1 - o.top_p) * total / static_cast<double>(vocab)) - 1e-3;
    candidates.gather(logits.data(), vocab, maxima.data(), static_cast<float>(largest + least / scale), largest, scale);
    candidates.keep_mass(o.top_p * total);
  } else {
    candidates.gather(logits.data(), vocab, maxima.data(), min_p_logit, largest, scale);
    return;
  }
  if (o.min_p > 0) candidates.keep_at_least(min_p_logit);
}

/// Step 9 without cuts.
Token Sampler::Impl::draw_from_all(std::span<const float> logits, float scale, double u) {
  sum_exp(logits, scale);
  const auto [at, share] = pick_chunk(sums, u);
  const std::int64_t begin = static_cast<std::int64_t>(at) * kSampleChunk, n = std::min(kSampleChunk, vocab - begin);
  kernels.exps(logits.data() + begin, n, largest, scale, chunk.data());
  return static_cast<Token>(begin + static_cast<std::int64_t>(pick_element(std::span(chunk).first(static_cast<std::size_t>(n)), share)));
}

Token Sampler::Impl::choose(const SamplerState& state, std::span<const float> logits) {
  const SamplingOptions& o = state.options();
  if (o.temperature == 0) {
    candidates.gather(logits.data(), vocab, maxima.data(), largest, largest, 0);
    return candidates.id(0);
  }
  const float scale = scale_of(o.temperature);
  const double u = SamplerWork::uniform(state);
  if ((o.top_k <= 0 || o.top_k >= vocab) && o.top_p >= 1 && o.min_p <= 0) return draw_from_all(logits, scale, u);
  cut(o, logits, scale);
  return candidates.draw(u);
}

Sampler::Sampler(std::int64_t vocab) {
  require(vocab >= 1, "[inference.sample] vocab is ", vocab, "; at least 1 is needed");
  impl_ = std::make_unique<Impl>(vocab);
}
Sampler::~Sampler() = default;

Choice Sampler::choose(SamplerState& state, std::span<float> logits, std::span<const std::uint32_t> allowed) {
  const auto size = static_cast<std::int64_t>(logits.size()), words = static_cast<std::int64_t>(allowed.size());
  require(size == impl_->vocab, "[inference.sample] ", size, " logits came for a vocabulary of ", impl_->vocab);
  require(words == 0 || words == (size + 31) / 32, "[inference.sample] `allowed` has ", words, " words; ", (size + 31) / 32, " are needed");
  SamplerWork::adjust(state, logits);
  Choice choice;
  const bool reports = state.options().logprobs >= 0;
  if (reports || allowed.empty()) impl_->scan(logits, nullptr);
  if (reports) impl_->report(state.options(), logits, choice);
  if (!allowed.empty()) impl_->scan(logits, allowed.data());
  choice.token = impl_->choose(state, logits);
  if (reports) choice.logprob = static_cast<float>(logits[static_cast<std::size_t>(choice.token)] - impl_->normaliser);
  SamplerWork::remember(state, choice.token);
  return choice;
}

}  // namespace unshard::inference
