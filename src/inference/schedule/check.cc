// check(): every invariant that can be seen from inside.
#include <algorithm>

#include "inference/schedule/schedule_state.h"
#include "unshard/core/error.h"

namespace unshard::inference {

void ScheduleState::check() const {
  pool_.check();
  check_blocks();
  std::int64_t running = 0, waiting = 0, held = 0, ended = 0;
  for (const auto& [id, sequence] : sequences_) {
    UNSHARD_DCHECK(sequence->id == id);
    check_sequence(*sequence);
    running += sequence->place == Place::running || sequence->place == Place::ended;
    waiting += sequence->place == Place::waiting;
    held += sequence->place == Place::held;
    ended += sequence->place == Place::ended;
  }
  UNSHARD_DCHECK(running == static_cast<std::int64_t>(running_.size()) && running <= max_running_);
  UNSHARD_DCHECK(waiting == static_cast<std::int64_t>(waiting_.size()));
  UNSHARD_DCHECK(held == held_ && ended == ended_);
  UNSHARD_DCHECK(std::ranges::is_sorted(running_, Before{}));
  UNSHARD_DCHECK(under_way_ != scheduled_.empty() && copies_.empty());
  UNSHARD_DCHECK(std::ranges::all_of(leaving_, [](std::int32_t users) { return users == 0; }));
}

void ScheduleState::check_sequence(const Sequence& s) const {
  const auto blocks = static_cast<std::int64_t>(s.blocks.size()), size = options_.block_tokens;
  UNSHARD_DCHECK(s.prompt > 0 && s.prompt <= s.length(), "sequence ", s.id);
  UNSHARD_DCHECK(s.chosen.empty() && (s.scheduled == 0 || std::ranges::count(scheduled_, &s) == 1), "sequence ", s.id);
  if (s.place == Place::waiting || s.place == Place::held) {
    UNSHARD_DCHECK(blocks == 0 && s.computed == 0 && s.scheduled == 0 && s.indexed == 0 && s.guesses.empty(), "sequence ", s.id);
    UNSHARD_DCHECK(s.place == Place::held || waiting_.contains(const_cast<Sequence*>(&s)), "sequence ", s.id);
  } else {
    UNSHARD_DCHECK(s.remaining() >= 0 && s.computed + s.scheduled + s.drafts() <= blocks * size, "sequence ", s.id);
    // All tokens but the last have blocks, and no more are held than they and the guesses under way need.
    UNSHARD_DCHECK(s.length() - 1 <= blocks * size && blocks <= (s.length() + s.drafts() + size - 1) / size, "sequence ", s.id);
    UNSHARD_DCHECK(s.guesses.empty() || s.computed + 1 == s.length(), "sequence ", s.id);
    UNSHARD_DCHECK(s.length() + static_cast<std::int64_t>(s.guesses.size()) < s.prompt + s.max_tokens || s.guesses.empty(), "sequence ",
                   s.id);
    UNSHARD_DCHECK(s.indexed * size <= s.computed, "sequence ", s.id);
  }
  for (std::int64_t i = 0; i < blocks; ++i) {
    const std::int32_t block = s.blocks[static_cast<std::size_t>(i)];
    const bool written_later = (i + 1) * size > s.computed;
    UNSHARD_DCHECK(!written_later || (pool_.users(block) == 1 && !pool_.known(block)), "sequence ", s.id, " block ", block);
    UNSHARD_DCHECK(i >= s.indexed || pool_.known(block), "sequence ", s.id, " block ", block);
  }
  for (const Sequence* fork : s.held_forks) {
    UNSHARD_DCHECK(fork->place == Place::held && fork->parent == s.id && s.place != Place::held, "sequence ", s.id);
  }
}

/// Users are the tables that name a block; known blocks are those of the index; every one's predecessor is in the index too.
void ScheduleState::check_blocks() const {
  std::vector<std::int32_t> users(static_cast<std::size_t>(pool_.size()));
  for (const Sequence* sequence : running_) {
    for (const std::int32_t block : sequence->blocks) ++users[static_cast<std::size_t>(block)];
  }
  std::int64_t known = 0;
  for (std::int32_t b = 0; b < pool_.size(); ++b) {
    UNSHARD_DCHECK(users[static_cast<std::size_t>(b)] == pool_.users(b), "block ", b);
    const bool in_index = pool_.state(b) != BlockState::free && pool_.known(b);
    UNSHARD_DCHECK(in_index == index_.holds(b), "block ", b);
    if (!in_index) continue;
    ++known;
    const std::int32_t before = index_.before(b);
    UNSHARD_DCHECK(before == PrefixIndex::kNone || (index_.holds(before) && pool_.users(before) >= pool_.users(b)), "block ", b);
  }
  UNSHARD_DCHECK(known == index_.size());
}

}  // namespace unshard::inference
