#pragma once
// A smaller model with the same vocabulary guesses, on the same workers, between the target's steps.
//
// [Note: a draft draws like its target] A guess is drawn with the sampling options and the random number that the target's token of that
// position will be drawn with. So the closer the two distributions are, the oftener the draws are equal, at any temperature, and a draft
// equal to its target is always right.
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "inference/runner.h"
#include "inference/speculate/proposer.h"
#include "inference/speculate/step_cost.h"

namespace unshard::inference {

class DraftProposer : public Proposer {
 public:
  DraftProposer(std::unique_ptr<Runner> runner, const EngineOptions& options, Workers& workers);
  ~DraftProposer() override;
  void measure() override { cost_ = StepCost::measure(*runner_, most_rows_); }
  void add(SequenceId id, std::span<const Token> prompt) override;
  void append(SequenceId id, Token token) override;
  void remove(SequenceId id) override;
  /// Computes what its cache lacks, at most step_tokens rows in one call: a sequence that is further behind gets no guesses yet. Nor does
  /// one that finds no blocks or is beyond the draft's context.
  void propose(std::span<Proposal> proposals) override;
  const StepCost* cost() const override { return &cost_.value(); }
  std::int64_t behind(SequenceId id) const override;
  std::int64_t free_blocks() const { return static_cast<std::int64_t>(free_.size()); }

 private:
  struct Sequence {
    std::vector<Token> tokens;         ///< the prompt, and what the target chose
    std::vector<Token> cached;         ///< whose keys and values are in `blocks`: the beginning of `tokens`, then perhaps guesses
    std::vector<std::int32_t> blocks;  ///< its own; there is no sharing
  };
  struct Pending {
    Proposal* proposal;
    Sequence* sequence;
    SamplerState sampler;
    bool failed = false;
  };
  bool room_for(Sequence& sequence, std::int64_t tokens);
  void feed(Sequence& sequence, std::span<const Token> tokens);
  std::vector<Pending> catch_up(std::span<Proposal> proposals);
  void draw(std::vector<Pending>& pending);

  std::unique_ptr<Runner> runner_;
  const std::int64_t most_rows_;
  Workers& workers_;
  std::vector<std::unique_ptr<Sampler>> samplers_;  ///< one a worker
  std::optional<StepCost> cost_;
  std::vector<std::int32_t> free_;
  std::unordered_map<SequenceId, Sequence> sequences_;
  Batch batch_;
  std::vector<float> logits_;
};

}  // namespace unshard::inference
