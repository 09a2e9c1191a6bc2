#include "inference/speculate/draft_proposer.h"

#include <algorithm>
#include <atomic>

namespace unshard::inference {

DraftProposer::DraftProposer(std::unique_ptr<Runner> runner, const EngineOptions& options, Workers& workers)
    : runner_(std::move(runner)), most_rows_(options.step_tokens), workers_(workers) {
  for (std::int64_t i = 0; i < workers.count(); ++i) samplers_.push_back(std::make_unique<Sampler>(runner_->info().vocab));
  for (auto block = runner_->kv_blocks(); block > 0; --block) free_.push_back(static_cast<std::int32_t>(block - 1));
}

DraftProposer::~DraftProposer() = default;

void DraftProposer::add(SequenceId id, std::span<const Token> prompt) { sequences_[id].tokens.assign(prompt.begin(), prompt.end()); }

void DraftProposer::append(SequenceId id, Token token) {
  auto& sequence = sequences_.at(id);
  const auto at = sequence.tokens.size();
  if (at < sequence.cached.size() && sequence.cached[at] != token) sequence.cached.resize(at);
  sequence.tokens.push_back(token);
}

void DraftProposer::remove(SequenceId id) {
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) return;
  free_.insert(free_.end(), found->second.blocks.begin(), found->second.blocks.end());
  sequences_.erase(found);
}

std::int64_t DraftProposer::behind(SequenceId id) const {
  const auto& sequence = sequences_.at(id);
  return std::max<std::int64_t>(1, std::ssize(sequence.tokens) - std::ssize(sequence.cached));
}

/// Blocks for so many tokens, or none more than it has.
bool DraftProposer::room_for(Sequence& sequence, std::int64_t tokens) {
  if (tokens > runner_->info().context) return false;
  const auto lacking = (tokens + kBlockTokens - 1) / kBlockTokens - static_cast<std::int64_t>(sequence.blocks.size());
  if (lacking > free_blocks()) return false;
  for (std::int64_t i = 0; i < lacking; ++i) {
    sequence.blocks.push_back(free_.back());
    free_.pop_back();
  }
  return true;
}

/// Tokens that follow the cached ones join the batch.
void DraftProposer::feed(Sequence& sequence, std::span<const Token> tokens) {
  batch_.add(tokens, static_cast<std::int64_t>(sequence.cached.size()), sequence.blocks.data());
  sequence.cached.insert(sequence.cached.end(), tokens.begin(), tokens.end());
}

/// Compute what the cache lacks. \return those of which logits have come, in the order of `logits_`
std::vector<DraftProposer::Pending> DraftProposer::catch_up(std::span<Proposal> proposals) {
  std::vector<Pending> pending;
  batch_.clear();
  for (auto& proposal : proposals) {
    auto& sequence = sequences_.at(proposal.sequence);
    const auto length = static_cast<std::int64_t>(sequence.tokens.size()),
               left = most_rows_ - static_cast<std::int64_t>(batch_.tokens.size());
    if (left == 0) break;
    if (proposal.most == 0 || !room_for(sequence, length + proposal.most - 1)) continue;
    sequence.cached.resize(std::min(sequence.cached.size(), sequence.tokens.size() - 1));  // the last token's logits are wanted again
    const auto cached = static_cast<std::int64_t>(sequence.cached.size()), rows = std::min(length - cached, left);
    feed(sequence, std::span(sequence.tokens).subspan(static_cast<std::size_t>(cached), static_cast<std::size_t>(rows)));
    if (cached + rows < length) continue;
    batch_.logit_rows.push_back(static_cast<std::int64_t>(batch_.tokens.size()) - 1);
    pending.push_back({&proposal, &sequence, *proposal.sampler});
  }
  if (!batch_.tokens.empty()) runner_->step({}, batch_, logits_);
  return pending;
}

/// One guess each, from `logits_`.
void DraftProposer::draw(std::vector<Pending>& pending) {
  const auto vocab = static_cast<std::size_t>(runner_->info().vocab);
  std::atomic<std::size_t> next{0};
  const auto work = [&](std::int64_t worker) {
    for (std::size_t i; (i = next.fetch_add(1)) < pending.size();) {
      try {
        const auto logits = std::span(logits_).subspan(i * vocab, vocab);
        pending[i].proposal->tokens.push_back(samplers_[static_cast<std::size_t>(worker)]->choose(pending[i].sampler, logits, {}).token);
      } catch (const std::runtime_error&) {  // a draft that computes NaN has no guess; the target's tokens come without it
        pending[i].failed = true;
      }
    }
  };
  if (pending.size() > 1)
    workers_.run(work);
  else
    work(0);
}

void DraftProposer::propose(std::span<Proposal> proposals) {
  auto pending = catch_up(proposals);
  for (draw(pending);; draw(pending)) {
    std::erase_if(pending, [](const Pending& each) {
      return each.failed || static_cast<std::int64_t>(each.proposal->tokens.size()) >= each.proposal->most;
    });
    if (pending.empty()) return;
    batch_.clear();
    for (auto& each : pending) {
      feed(*each.sequence, std::span(each.proposal->tokens).last(1));
      batch_.logit_rows.push_back(static_cast<std::int64_t>(batch_.tokens.size()) - 1);
    }
    runner_->step({}, batch_, logits_);
  }
}

}  // namespace unshard::inference
