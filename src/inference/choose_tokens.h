#pragma once
// The tokens of a step: the next one of each sequence that wants one, and one more after each guess that turns out to be right.
//
// [Note: sample and match] Where a step computes guesses of a sequence (speculative decoding), its rows hold the model's logits after each
// of them. The token of a row is drawn as it would be without guesses: from that row's logits, through the same filter, penalties and cuts,
// which have seen the tokens before it, with that position's own random number. The next row counts if the token drawn equals its guess,
// and the rest is dropped if not. So what comes out is bit for bit what comes without guesses, for every option, seed and way of guessing,
// and its distribution is the model's by construction. A guess x is accepted with the model's probability p(x): for a proposal without a
// distribution of its own that is all that the rejection rule min(1, p / q) of arXiv 2211.17192 accepts too.
#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "inference/kernels/workers.h"
#include "inference/sample/sampler.h"

namespace unshard::inference {

/// What choosing a sequence's tokens depends on, and what it changes.
struct Generation {
  std::shared_ptr<const RequestOptions> options;
  std::shared_ptr<TokenFilter> filter;
  SamplerState sampler;
  std::vector<Token> generated;
};

/// One sequence's part of a step.
struct Draw {
  Generation* generation = nullptr;
  std::span<const Token> guesses;  ///< the sequence has 1 + guesses rows of logits

  std::vector<Choice> choices;   ///< out: 1 to 1 + guesses of them; none, or fewer, beside an error
  Finish finish = Finish::none;  ///< out: the last of them ends the sequence
  std::string error;             ///< out: why the token after them couldn't be chosen
};

class TokenChooser {
 public:
  TokenChooser(std::int64_t vocab, const std::vector<Token>& end_tokens, Workers& workers);
  /// Choose, and append to each Generation. Filters are asked on this thread.
  /// \param logits  rows of all draws, one after another; changed
  void choose(std::vector<Draw>& draws, std::span<float> logits);

 private:
  struct Turn {
    Draw* draw;
    std::span<float> logits;  ///< of its next row
    std::vector<std::uint32_t> allowed;
  };
  void mask(const Generation& generation, std::vector<std::uint32_t>& allowed) const;
  void choose_one(Turn& turn, Sampler& sampler) const;
  void choose_each(std::vector<Turn>& turns);
  bool settle(Draw& draw) const;

  const std::int64_t vocab_;
  const std::set<Token> end_tokens_;
  Workers& workers_;
  std::vector<std::unique_ptr<Sampler>> samplers_;  ///< one a worker
};

}  // namespace unshard::inference
