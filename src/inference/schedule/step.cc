// next(): what the step computes.
#include <algorithm>

#include "inference/schedule/schedule_state.h"
#include "unshard/core/error.h"

namespace unshard::inference {

Step ScheduleState::next() {
  UNSHARD_DCHECK(!under_way_, "next() before finish_step() of the step under way");
  budget_ = options_.step_tokens * token_cost_;
  for (Sequence* sequence : running_) {
    if (sequence->remaining() > 1) share_more(*sequence);
  }
  schedule_single_tokens();
  admit_waiting();
  schedule_prompts();
  schedule_guesses();
  Step step;
  step.chunks.reserve(scheduled_.size());
  for (const Sequence* sequence : scheduled_) {
    step.chunks.push_back(chunk_of(*sequence));
    step.tokens += static_cast<std::int64_t>(step.chunks.back().tokens.size());
  }
  step.copies = std::exchange(copies_, {});
  under_way_ = !scheduled_.empty();
  return step;
}

void ScheduleState::schedule(Sequence& sequence, std::int64_t tokens, std::int64_t cost) {
  if (sequence.scheduled == 0) scheduled_.push_back(&sequence);
  sequence.scheduled += tokens;
  budget_ = std::max<std::int64_t>(0, budget_ - cost);
}

/// See [Note: what a token costs].
std::int64_t ScheduleState::prompt_token_cost(const Sequence& prompt) const {
  if (options_.look_back_tokens == 0) return token_cost_;
  return std::clamp(token_cost_ + prompt.computed, token_cost_, std::max(token_cost_, options_.step_tokens * token_cost_ / 4));
}

/// As much of a prompt as `budget` pays for.
void ScheduleState::schedule_prompt(Sequence& prompt, std::int64_t budget) {
  const std::int64_t cost = prompt_token_cost(prompt), tokens = std::min(budget / cost, prompt.remaining());
  if (tokens == 0) return;
  prompt_tokens_ += tokens;
  prompt.since += tokens;
  schedule(prompt, tokens, tokens * cost);
}

/// Sequences that lack one token, best first. At most max_running_ <= step_tokens of them: the budget is enough.
void ScheduleState::schedule_single_tokens() {
  for (std::size_t i = 0; i < running_.size(); ++i) {  // preemption takes from the end
    Sequence& sequence = *running_[i];
    if (sequence.remaining() == 1 && ensure_block(sequence)) schedule(sequence, 1, token_cost_);
  }
}

/// The block of the last token. \return false: the sequence was the worst, and was preempted itself
bool ScheduleState::ensure_block(Sequence& sequence) {
  if (static_cast<std::int64_t>(sequence.blocks.size()) * options_.block_tokens >= sequence.length()) return true;
  for (;;) {
    if (const std::int32_t block = take_block(); block >= 0) {
      sequence.blocks.push_back(block);
      return true;
    }
    UNSHARD_DCHECK(running_.size() > 1, "sequence ", sequence.id, " of ", sequence.length(), " tokens outgrew all ", options_.blocks,
                   " blocks: it was not removed at its max_tokens");
    const bool itself = running_.back() == &sequence;
    preempt_worst();
    if (itself) return false;
  }
}

/// What single tokens left of the budget, by [Note: how prompts share a step].
void ScheduleState::schedule_prompts() {
  std::vector<Sequence*> prompts;
  for (auto at = running_.begin(); at != running_.end();) {
    const std::int64_t priority = (*at)->priority;
    prompts.clear();
    for (; at != running_.end() && (*at)->priority == priority; ++at) {
      if ((*at)->remaining() > 0) prompts.push_back(*at);
    }
    if (budget_ >= token_cost_ && !prompts.empty()) share_budget(prompts);
  }
}

/// \param prompts  of one priority, the oldest first; sorted here
void ScheduleState::share_budget(std::vector<Sequence*>& prompts) {
  Sequence& oldest = *prompts.front();
  std::ranges::stable_sort(prompts, {}, &Sequence::due);
  schedule_prompt(oldest, std::max(budget_ / 4, prompt_token_cost(oldest)));  // one token at least
  for (Sequence* prompt : prompts) schedule_prompt(*prompt, budget_);
}

Chunk ScheduleState::chunk_of(const Sequence& sequence) const {
  const std::int64_t end = sequence.computed + sequence.scheduled, drafts = sequence.drafts();
  const std::int64_t blocks = (end + drafts + options_.block_tokens - 1) / options_.block_tokens;
  Chunk chunk{sequence.id,
              sequence.computed,
              {sequence.tokens.begin() + sequence.computed, sequence.tokens.begin() + end},
              {sequence.blocks.begin(), sequence.blocks.begin() + blocks},
              sequence.wants_token(),
              drafts};
  chunk.tokens.insert(chunk.tokens.end(), sequence.guesses.begin(), sequence.guesses.begin() + drafts);
  return chunk;
}

}  // namespace unshard::inference
