#pragma once
// How the next token is chosen, and what a request may ask for. One struct for C++, Python and the server.
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace unshard::inference {

using Token = std::int32_t;

/// Which tokens may come next, for constrained output (a JSON schema, a regular expression). Called on the engine's thread before each
/// token of a sequence is sampled.
struct TokenFilter {
  virtual ~TokenFilter() = default;
  /// \param generated  what this sequence has generated so far
  /// \param allowed    [ceil(vocab / 32)] words, all ones; clear the bit of each token that must not come (bit t % 32 of word t / 32)
  virtual void restrict(std::span<const Token> generated, std::span<std::uint32_t> allowed) = 0;
};

struct SamplingOptions {
  double temperature = 1.0;  ///< 0: the likeliest token (greedy)
  double top_p = 1.0;        ///< (0, 1]: the fewest likeliest tokens whose probabilities reach it
  std::int64_t top_k = 0;    ///< 0: all
  double min_p = 0.0;        ///< [0, 1): at least this share of the likeliest token's probability
  double repetition_penalty =
      1.0;  ///< [0.01, 100]: logits of tokens in prompt or output are divided (positive) or multiplied (negative) by it
  double presence_penalty = 0.0;      ///< [-2, 2]: subtracted once from tokens in the output
  double frequency_penalty = 0.0;     ///< [-2, 2]: subtracted for each time a token is in the output
  std::optional<std::uint64_t> seed;  ///< the same tokens whatever else runs beside; nothing: a random one
  std::vector<std::pair<Token, float>> logit_bias;
  std::int64_t logprobs = -1;  ///< report the log-probability of each token and of this many likeliest ones; -1: none
};

struct RequestOptions {
  SamplingOptions sampling;
  std::int64_t max_tokens = 16;                       ///< generated tokens at most; -1: as many as the context holds
  std::int64_t min_tokens = 0;                        ///< no end token before this many, unless a filter leaves nothing else
  std::int64_t n = 1;                                 ///< sequences of one prompt, which share its blocks
  std::vector<Token> stop_tokens;                     ///< beside the model's own end tokens
  bool ignore_eos = false;                            ///< go on after the model's end tokens
  std::int64_t priority = 0;                          ///< lower runs first; equal: first come, first served
  std::vector<std::shared_ptr<TokenFilter>> filters;  ///< none, or one for each of the n sequences
  /// \throws std::invalid_argument naming the option, its value and what is accepted.
  void validate(std::int64_t vocab) const;
};

}  // namespace unshard::inference
