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
  std::int64_t spare = options_.step_tokens;
  for (const Sequence* sequence : running_) spare -= std::min(spare, sequence->remaining());
  return spare;
}

/// The last part of next(): what is left of the budget, in even parts, as the first guesses of a sequence are likelier than its last.
void ScheduleState::schedule_guesses() {
  std::int64_t guessed = std::ranges::count_if(running_, [](const Sequence* each) { return !each->guesses.empty(); });
  for (std::size_t i = 0; guessed > 0; ++i) {
    if (running_[i]->guesses.empty()) continue;
    take_guesses(*running_[i], budget_ / guessed--);
  }
}

/// At most `most` of a sequence's guesses, as many as unused blocks hold. The others are forgotten.
void ScheduleState::take_guesses(Sequence& sequence, std::int64_t most) {
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
  budget_ -= drafts;
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
