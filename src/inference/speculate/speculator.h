#pragma once
// Speculative decoding: guesses for the sequences of a step, as many as pay.
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "inference/runner.h"
#include "inference/speculate/acceptance.h"
#include "inference/speculate/proposer.h"
#include "inference/speculate/step_cost.h"

namespace unshard::inference {

class Speculator {
 public:
  Speculator(std::unique_ptr<Proposer> proposer, const EngineOptions& options);
  /// Learn what steps cost. Before all others, on the engine's thread; the target's cache holds nothing yet.
  void measure(Runner& target);
  void add(SequenceId id, std::span<const Token> prompt);
  void remove(SequenceId id);
  /// \param wanted  sequences whose last token the next step computes, with the guesses that can be used at most
  /// \param room    tokens that the step has left for guesses
  /// \return        those of `wanted` that got guesses
  std::vector<Proposal> propose(std::vector<Proposal> wanted, std::int64_t room);
  /// A step of so many rows, prompts not among them, took so long.
  void computed(std::int64_t rows, double seconds) { cost_->observe(rows, seconds); }
  /// The sequence's tokens of the step that is done; each call follows a propose() that may have had guesses for it.
  void chosen(SequenceId id, std::span<const Choice> choices);

 private:
  struct Sequence {
    Acceptance acceptance;
    std::vector<Token> guesses;  ///< of the last propose(), computed or not
    std::int64_t match = 0;
  };
  std::vector<double> chances(const Proposal& proposal) const;
  void keep_what_pays(std::vector<Proposal>& wanted, std::int64_t room);

  std::unique_ptr<Proposer> proposer_;
  const std::int64_t most_guesses_, step_tokens_;
  const bool always_;
  std::optional<StepCost> cost_;
  Acceptance overall_;  ///< what new sequences begin with
  std::unordered_map<SequenceId, Sequence> sequences_;
};

/// As options.speculate says; null where it says nothing. `target` is used during the call only; `other_devices` as in Runner.
/// \throws ModelError, std::invalid_argument  the draft model can't be opened, or isn't one for this target
std::unique_ptr<Speculator> make_speculator(const EngineOptions& options, const Runner& target, Workers& workers,
                                            const ModelFactory& other_devices);

}  // namespace unshard::inference
