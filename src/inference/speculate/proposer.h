#pragma once
// Who guesses a sequence's next tokens. Guesses cost or save time; they never change what is generated ([Note: sample and match],
// choose_tokens.h).
#include <cstdint>
#include <span>
#include <vector>

#include "inference/sample/sampler.h"
#include "inference/schedule/scheduler.h"

namespace unshard::inference {

/// Guesses for one sequence.
struct Proposal {
  SequenceId sequence = 0;
  std::int64_t left = 0;                  ///< guesses that the sequence could use until its end
  std::int64_t most = 0;                  ///< guesses wanted, at most
  const SamplerState* sampler = nullptr;  ///< as it is before the sequence's next token
  std::vector<Token> tokens;              ///< out: the guesses; may be none
  std::int64_t match = 0;                 ///< out: so many last tokens were found before, followed by `tokens`; 0: not guessed that way
};

class StepCost;

/// Holds the tokens of each sequence. All calls on the engine's thread.
class Proposer {
 public:
  virtual ~Proposer() = default;
  virtual void add(SequenceId id, std::span<const Token> prompt) = 0;
  /// The sequence's next token, as the model chose it.
  virtual void append(SequenceId id, Token token) = 0;
  virtual void remove(SequenceId id) = 0;
  virtual void propose(std::span<Proposal> proposals) = 0;
  /// Before all else: learn what guessing costs.
  virtual void measure() {}
  /// What its steps take; null: it makes guesses in no time, and so all that it can before it is known how many are of use.
  virtual const StepCost* cost() const { return nullptr; }
  /// Tokens to compute before the sequence's first guess.
  virtual std::int64_t behind(SequenceId) const { return 0; }
};

}  // namespace unshard::inference
