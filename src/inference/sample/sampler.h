#pragma once
// The next token of one sequence from its logits.
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "unshard/inference/engine.h"
#include "unshard/inference/sampling.h"

namespace unshard::inference {

/// What sampling must remember of one sequence. Holds counts of tokens only where a penalty asks for them.
class SamplerState {
 public:
  /// \param seed  of this sequence: options.seed, or a random one, mixed with the sequence's index
  SamplerState(const SamplingOptions& options, std::uint64_t seed, std::span<const Token> prompt);
  const SamplingOptions& options() const { return options_; }

 private:
  friend struct SamplerWork;
  SamplingOptions options_;
  std::uint64_t seed_ = 0, drawn_ = 0;
  std::unordered_map<Token, std::int32_t> prompt_, output_;
};

struct Choice {
  Token token = -1;
  float logprob = 0;                    ///< of the model's distribution after penalties and bias, before temperature and cuts
  std::vector<TokenLogprob> likeliest;  ///< options.logprobs of them
};

/// Scratch of one worker; reused.
class Sampler {
 public:
  explicit Sampler(std::int64_t vocab);
  ~Sampler();
  /// Choose and remember. Order: bias, penalties, filter, temperature, top_k, top_p, min_p. The draw depends on the seed and on how many
  /// tokens this sequence has drawn, on nothing else.
  /// \param logits   [vocab]; changed
  /// \param allowed  empty, or [ceil(vocab / 32)] words as in TokenFilter
  /// \throws std::runtime_error  a logit is NaN, or no token is allowed
  Choice choose(SamplerState& state, std::span<float> logits, std::span<const std::uint32_t> allowed);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace unshard::inference
