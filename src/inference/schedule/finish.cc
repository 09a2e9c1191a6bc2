// finish_step(): what was computed counts, chosen tokens join their sequences, and ended sequences go. It says that every chunk was
// computed: after a step that failed the cache holds garbage that the prefix index would hand out, so a new scheduler is needed.
#include <algorithm>

#include "inference/schedule/schedule_state.h"
#include "unshard/core/error.h"

namespace unshard::inference {

void ScheduleState::finish_step(std::span<const Chosen> chosen) {
  check_chosen(chosen);
  for (Sequence* sequence : scheduled_) commit(*sequence);
  scheduled_.clear();
  under_way_ = false;
  if (ended_ == 0) return;
  std::vector<Sequence*> ended;
  for (Sequence* sequence : running_) {
    if (sequence->place == Place::ended) ended.push_back(sequence);
  }
  for (Sequence* sequence : ended) {
    stop_running(*sequence);
    erase(*sequence);
  }
  ended_ = 0;
}

/// Each wanted token is there, accepted guesses are those proposed, and nothing else. Changes nothing if it throws.
void ScheduleState::check_chosen(std::span<const Chosen> chosen) {
  const auto refuse = [&](SequenceId id, const char* what) {
    for (Sequence* sequence : scheduled_) sequence->chosen = {};
    throw std::invalid_argument(cat("[inference.finish_step] sequence ", id, " ", what));
  };
  for (const auto& [id, tokens] : chosen) {
    Sequence* sequence = find(id);
    if (sequence == nullptr || sequence->place == Place::ended) continue;  // removed meanwhile
    if (!sequence->wants_token()) refuse(id, "wanted no token; give one for each chunk with wants_token");
    if (!sequence->chosen.empty()) refuse(id, "was named twice; name each chunk with wants_token once");
    if (tokens.empty()) refuse(id, "wants a token and got none; choose one, or remove the sequence first");
    if (tokens.size() > sequence->guesses.size() + 1) refuse(id, "got more tokens than its guesses and one; give at most 1 + drafts");
    if (!std::equal(tokens.begin(), tokens.end() - 1, sequence->guesses.begin())) {
      refuse(id, "got other tokens before its last than the guesses that were computed; only the last may be the model's own");
    }
    sequence->chosen = tokens;
  }
  for (const Sequence* sequence : scheduled_) {
    if (sequence->wants_token() && sequence->chosen.empty() && sequence->place != Place::ended) {
      refuse(sequence->id, "wants a token and got none; choose one, or remove the sequence first");
    }
  }
}

void ScheduleState::commit(Sequence& sequence) {
  const auto chosen = std::exchange(sequence.chosen, {});
  const auto accepted = chosen.empty() ? 0 : static_cast<std::int64_t>(chosen.size()) - 1;
  sequence.tokens.insert(sequence.tokens.end(), chosen.begin(), chosen.end());
  sequence.computed += std::exchange(sequence.scheduled, 0) + accepted;
  sequence.guesses.clear();
  give_back_blocks_of_guesses(sequence);
  index_full_blocks(sequence);
  if (sequence.held_forks.empty() || sequence.computed < sequence.prompt) return;
  held_ -= static_cast<std::int64_t>(sequence.held_forks.size());
  for (Sequence* fork : std::exchange(sequence.held_forks, {})) wait(*fork);
}

/// Blocks that became full enter the prefix index. Where another sequence computed the same at the same time, its block takes the place of
/// this one's, so that each block's predecessor in the index is its predecessor in every table (see prefix_index.h).
void ScheduleState::index_full_blocks(Sequence& sequence) {
  const std::int64_t size = options_.block_tokens;
  while (sequence.index_more && (sequence.indexed + 1) * size <= sequence.computed) {
    const std::int32_t own = sequence.blocks[static_cast<std::size_t>(sequence.indexed)];
    const PrefixIndex::Key next = next_to_index(sequence);
    std::int32_t block = index_.find(next);
    if (block == PrefixIndex::kNone) {
      // A block that others have in their tables, but not in the index, must not enter it here: theirs may have another predecessor.
      sequence.index_more = pool_.users(own) == 1 && index_.insert(next, own);
      if (!sequence.index_more) return;
      pool_.mark_known(own);
      block = own;
    }
    share_next(sequence, next, block);
  }
}

/// The key of a sequence's first full block that it doesn't know from the index.
PrefixIndex::Key ScheduleState::next_to_index(const Sequence& sequence) const {
  const std::int64_t size = options_.block_tokens, i = sequence.indexed;
  const auto tokens = std::span<const Token>(sequence.tokens).subspan(static_cast<std::size_t>(i * size), static_cast<std::size_t>(size));
  const std::int32_t before = i == 0 ? PrefixIndex::kNone : sequence.blocks[static_cast<std::size_t>(i - 1)];
  return {index_.extend(sequence.chain, tokens), before, sequence.salt, tokens};
}

/// The index has `block` for the sequence's next full block: it stands in its table from now on.
void ScheduleState::share_next(Sequence& sequence, const PrefixIndex::Key& next, std::int32_t block) {
  std::int32_t& own = sequence.blocks[static_cast<std::size_t>(sequence.indexed)];
  if (block != own) {
    pool_.retain(block);
    pool_.release(own);
    own = block;
    ++openings_;
  }
  sequence.chain = next.chain;
  ++sequence.indexed;
}

}  // namespace unshard::inference
