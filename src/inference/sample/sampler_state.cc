#include "inference/sample/random.h"
#include "inference/sample/sampler_work.h"
#include "unshard/core/error.h"

namespace unshard::inference {
namespace {

float& logit_of(std::span<float> logits, Token token) {
  require(token >= 0 && static_cast<std::size_t>(token) < logits.size(), "[inference.sample] token ", token,
          " is outside the vocabulary of ", logits.size());
  return logits[static_cast<std::size_t>(token)];
}

bool counts_output(const SamplingOptions& o) { return o.repetition_penalty != 1 || o.presence_penalty != 0 || o.frequency_penalty != 0; }

}  // namespace

SamplerState::SamplerState(const SamplingOptions& options, std::uint64_t seed, std::span<const Token> prompt)
    : options_(options), seed_(seed) {
  if (options_.repetition_penalty == 1) return;
  for (const Token token : prompt) prompt_[token] = 1;
}

void SamplerWork::adjust(const SamplerState& state, std::span<float> logits) {
  const SamplingOptions& o = state.options_;
  for (const auto& [token, bias] : o.logit_bias) logit_of(logits, token) += bias;
  if (o.repetition_penalty != 1) {
    const auto penalty = static_cast<float>(o.repetition_penalty);
    const auto penalise = [&](Token token) {
      float& logit = logit_of(logits, token);
      logit = logit > 0 ? logit / penalty : logit * penalty;
    };
    for (const auto& [token, count] : state.prompt_) penalise(token);
    for (const auto& [token, count] : state.output_) {
      if (!state.prompt_.contains(token)) penalise(token);
    }
  }
  if (o.frequency_penalty != 0 || o.presence_penalty != 0) {
    for (const auto& [token, count] : state.output_) {
      logit_of(logits, token) -= static_cast<float>(o.frequency_penalty * count + o.presence_penalty);
    }
  }
}

double SamplerWork::uniform(const SamplerState& state) { return uniform_draw(state.seed_, state.drawn_); }

void SamplerWork::remember(SamplerState& state, Token token) {
  ++state.drawn_;
  if (counts_output(state.options_)) ++state.output_[token];
}

}  // namespace unshard::inference
