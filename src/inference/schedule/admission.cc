// Waiting -> running, and back by preemption.
#include <algorithm>

#include "inference/schedule/schedule_state.h"
#include "unshard/core/error.h"

namespace unshard::inference {

/// A block to write, or -1 if every one is in use.
std::int32_t ScheduleState::take_block() {
  const auto [block, evicted] = pool_.take();
  if (evicted) index_.erase(block);
  return block;
}

/// The computed sequence with this fork's prompt, if it still has its blocks.
const Sequence* ScheduleState::parent_to_share(const Sequence& sequence) const {
  if (!sequence.parent) return nullptr;
  const Sequence* parent = find(*sequence.parent);
  return parent != nullptr && parent->computed >= parent->prompt ? parent : nullptr;
}

/// Put blocks of equal beginnings into the table: full ones, and never all tokens, as the last one's logits are wanted.
void ScheduleState::share_prefix(Sequence& sequence) {
  const std::int64_t size = options_.block_tokens, most = (sequence.length() - 1) / size;
  sequence.index_more = options_.share_prefixes;
  sequence.chain = index_.start(sequence.salt);
  if (const Sequence* parent = parent_to_share(sequence)) {
    sequence.blocks.assign(parent->blocks.begin(), parent->blocks.begin() + most);
  } else if (options_.share_prefixes) {
    for (; sequence.indexed < most; ++sequence.indexed) {
      const PrefixIndex::Key next = next_to_index(sequence);
      const std::int32_t block = index_.find(next);
      if (block == PrefixIndex::kNone) break;
      sequence.blocks.push_back(block);
      sequence.chain = next.chain;
    }
  }
  for (const std::int32_t block : sequence.blocks) pool_.retain(block);
  sequence.computed = static_cast<std::int64_t>(sequence.blocks.size()) * size;
}

/// Tokens that others computed for this sequence too: it didn't wait while they did.
void ScheduleState::count_shared(Sequence& sequence, std::int64_t tokens) {
  shared_tokens_ += tokens;
  sequence.since = std::min(prompt_tokens_, sequence.since + tokens);
}

/// What others have computed since this sequence was admitted: their blocks take the place of its own.
void ScheduleState::share_more(Sequence& sequence) {
  const std::int64_t size = options_.block_tokens, most = (sequence.length() - 1) / size;
  while (sequence.index_more && sequence.indexed < most) {
    const PrefixIndex::Key next = next_to_index(sequence);
    const std::int32_t block = index_.find(next);
    if (block == PrefixIndex::kNone) return;
    share_next(sequence, next, block);
    const std::int64_t more = std::max<std::int64_t>(0, sequence.indexed * size - sequence.computed);
    sequence.computed += more;
    count_shared(sequence, more);
  }
}

/// Preempt sequences of strictly worse priority, if this makes a place and `blocks` blocks (and one for each that still runs) available for
/// `sequence`, and none otherwise.
bool ScheduleState::make_room(const Sequence& sequence, std::int64_t blocks) {
  std::size_t stay = running_.size();
  std::int64_t available = pool_.available();
  std::vector<std::int32_t> counted;
  const auto fits = [&] {
    const auto running = static_cast<std::int64_t>(stay);
    return running < max_running_ && available >= blocks + running;
  };
  while (!fits() && stay > 0 && running_[stay - 1]->priority > sequence.priority) {
    for (const std::int32_t block : running_[--stay]->blocks) {
      counted.push_back(block);
      if (++leaving_[static_cast<std::size_t>(block)] == pool_.users(block)) ++available;
    }
  }
  for (const std::int32_t block : counted) leaving_[static_cast<std::size_t>(block)] = 0;
  if (!fits()) return false;
  while (running_.size() > stay) preempt_worst();
  return true;
}

/// [Note: a fork copies at once] A fork computes its prompt's last token again, for logits of its own, and so writes the partly filled
/// block at once: it gets its copy here, in the step that admits it, and no block is ever both shared and written later. The copy's source
/// belongs to its parent, which is better and can't be preempted for a later admission of the step: no copy reads what another writes.
bool ScheduleState::admit(Sequence& sequence) {
  if (refused_ == &sequence && refused_at_ == openings_ && !running_.empty()) return false;
  share_prefix(sequence);
  const std::int64_t size = options_.block_tokens, total = (sequence.length() + size - 1) / size;
  if (!make_room(sequence, total - static_cast<std::int64_t>(sequence.blocks.size()))) {
    give_back_blocks(sequence);
    refused_ = &sequence;
    refused_at_ = openings_;
    return false;
  }
  const Sequence* parent = parent_to_share(sequence);
  const auto shared = static_cast<std::int64_t>(sequence.blocks.size());
  while (static_cast<std::int64_t>(sequence.blocks.size()) < total) sequence.blocks.push_back(take_block());
  if (parent != nullptr) {
    sequence.computed = sequence.prompt - 1;
    if (sequence.computed % size != 0) {
      copies_.emplace_back(parent->blocks[static_cast<std::size_t>(shared)], sequence.blocks[static_cast<std::size_t>(shared)]);
    }
  }
  count_shared(sequence, sequence.computed);
  sequence.parent.reset();
  waiting_.erase(&sequence);
  sequence.place = Place::running;
  running_.insert(std::ranges::upper_bound(running_, &sequence, Before{}), &sequence);
  return true;
}

/// In order, as many as find a place. How many tokens the step computes of them is decided afterwards.
void ScheduleState::admit_waiting() {
  while (!waiting_.empty() && admit(**waiting_.begin())) {
  }
}

/// By recomputation: the blocks go back (full ones stay known to the prefix index, and may be found again), the tokens stay. Swapping
/// blocks to host memory instead would hook in here and in admit(): copies out, a Place of its own, copies in.
void ScheduleState::preempt_worst() {
  Sequence& worst = *running_.back();
  budget_ += worst.scheduled * token_cost_;
  std::erase(scheduled_, &worst);
  stop_running(worst);
  wait(worst);
  ++preemptions_;
}

}  // namespace unshard::inference
