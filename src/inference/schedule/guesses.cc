// propose(): guesses at the next tokens, see [Note: guesses].
#include <algorithm>

#include "inference/schedule/schedule_state.h"
#include "unshard/core/error.h"

namespace unshard::inference {

void ScheduleState::propose(SequenceId id, std::span<const Token> guesses) {
  UNSHARD_DCHECK(!under_way_, "propose() before finish_step() of the step under way");
  const auto most = static_cast<std::size_t>(most_guesses(id));
  if (most == 0) return;
  const auto taken = guesses.first(std::min(guesses.size(), most));
  find(id)->guesses.assign(taken.begin(), taken.end());
}

std::int64_t ScheduleState::most_guesses(SequenceId id) const {
  const Sequence* sequence = find(id);
  if (sequence == nullptr || sequence->place != Place::running || sequence->remaining() != 1) return 0;
  return std::max<std::int64_t>(0, sequence->prompt + sequence->max_tokens - sequence->length() - 1);
}

std::int64_t ScheduleState::spare_tokens() const {
  std::int64_t spare = options_.step_tokens * token_cost_;
  for (const Sequence* sequence : running_) {
    const std::int64_t tokens = sequence->remaining();
    spare -= tokens == 1 ? token_cost_ : tokens * prompt_token_cost(*sequence);
  }
  return std::max<std::int64_t>(0, spare / token_cost_);
}

/// The last part of next(): what is left of the budget, in even parts, as the first guesses of a sequence are likelier than its last. A
/// guess costs what a single token does.
void ScheduleState::schedule_guesses() {
  const bool nobody_waits = std::ranges::all_of(running_, [](const Sequence* each) { return each->remaining() == 0; });
  std::int64_t left = nobody_waits ? budget_ / token_cost_ : 0;
  std::int64_t guessed = std::ranges::count_if(running_, [](const Sequence* each) { return !each->guesses.empty(); });
  for (std::size_t i = 0; guessed > 0; ++i) {
    if (running_[i]->guesses.empty()) continue;
    left -= take_guesses(*running_[i], left / guessed--);
  }
}

/// At most `most` of a sequence's guesses, as many as unused blocks hold. The others are forgotten. \return how many
std::int64_t ScheduleState::take_guesses(Sequence& sequence, std::int64_t most) {
  UNSHARD_DCHECK(sequence.wants_token(), "sequence ", sequence.id, " has guesses and lacks a token");
  std::int64_t drafts = std::min(most, sequence.drafts());
  const auto room = [&] { return static_cast<std::int64_t>(sequence.blocks.size()) * options_.block_tokens - sequence.length(); };
  while (room() < drafts) {
    const std::int32_t block = take_block();
    if (block < 0) break;
    sequence.blocks.push_back(block);
  }
  drafts = std::min(drafts, room());
  sequence.guesses.resize(static_cast<std::size_t>(drafts));
  budget_ -= drafts * token_cost_;
  return drafts;
}

/// After a step: no more blocks than the sequence's tokens need.
void ScheduleState::give_back_blocks_of_guesses(Sequence& sequence) {
  const std::int64_t needed = (sequence.length() + options_.block_tokens - 1) / options_.block_tokens;
  while (static_cast<std::int64_t>(sequence.blocks.size()) > needed) {
    pool_.release(sequence.blocks.back());
    sequence.blocks.pop_back();
    ++openings_;
  }
}

}  // namespace unshard::inference
