#include "inference/schedule/scheduler.h"

#include <algorithm>

#include "inference/schedule/schedule_state.h"
#include "unshard/core/error.h"

namespace unshard::inference {
namespace {

void check_options(const SchedulerOptions& o) {
  const auto positive = [](const char* name, std::int64_t value) {
    require(value >= 1, "[inference.schedule] ", name, " is ", value, "; at least 1 is needed");
  };
  positive("blocks", o.blocks);
  positive("block_tokens", o.block_tokens);
  positive("step_tokens", o.step_tokens);
  positive("max_sequences", o.max_sequences);
  require(o.look_back_tokens >= 0, "[inference.schedule] look_back_tokens is ", o.look_back_tokens, "; 0 (no cost) or more is needed");
}

}  // namespace

ScheduleState::ScheduleState(const SchedulerOptions& options, std::uint64_t hash_mask)
    : options_((check_options(options), options)),
      token_cost_(std::max<std::int64_t>(options.look_back_tokens, 1)),
      max_running_(std::min(options.max_sequences, options.step_tokens)),
      pool_(options.blocks),
      index_(options.blocks, options.block_tokens, hash_mask),
      leaving_(static_cast<std::size_t>(options.blocks)) {}

Sequence* ScheduleState::find(SequenceId id) const {
  const auto found = sequences_.find(id);
  return found == sequences_.end() ? nullptr : found->second.get();
}

Sequence& ScheduleState::create(SequenceId id) {
  const auto [at, added] = sequences_.try_emplace(id);
  require(added, "[inference.schedule] sequence ", id, " is here already; choose an id that was never used");
  at->second = std::make_unique<Sequence>();
  at->second->id = id;
  at->second->arrival = arrivals_++;
  at->second->since = prompt_tokens_;
  return *at->second;
}

void ScheduleState::add(NewSequence added) {
  const auto prompt = static_cast<std::int64_t>(added.prompt.size());
  require(prompt > 0, "[inference.schedule] sequence ", added.id, " has an empty prompt");
  // The last generated token is never computed.
  const std::int64_t most = prompt + std::max<std::int64_t>(added.max_tokens, 1) - 1, held = options_.blocks * options_.block_tokens;
  require(most <= held, "[inference.schedule] sequence ", added.id, " may need ", most, " tokens, but all ", options_.blocks,
          " blocks hold ", held, "; shorten its prompt or max_tokens");
  Sequence& sequence = create(added.id);
  sequence.tokens = std::move(added.prompt);
  sequence.prompt = prompt;
  sequence.max_tokens = std::max<std::int64_t>(added.max_tokens, 1);
  sequence.priority = added.priority;
  sequence.salt = added.prefix_salt;
  wait(sequence);
}

void ScheduleState::add_fork(SequenceId parent_id, SequenceId id) {
  Sequence* parent = find(parent_id);
  require(parent != nullptr && parent->place != Place::ended, "[inference.schedule] sequence ", parent_id,
          " has ended or was never added, and can't be forked; add its fork before removing it");
  if (parent->place == Place::held) parent = find(*parent->parent);  // the same prompt
  Sequence& fork = create(id);
  fork.tokens.assign(parent->tokens.begin(), parent->tokens.begin() + parent->prompt);
  fork.prompt = parent->prompt;
  fork.max_tokens = parent->max_tokens;
  fork.priority = parent->priority;
  fork.salt = parent->salt;
  fork.parent = parent->id;
  if (parent->computed >= parent->prompt) return wait(fork);
  fork.place = Place::held;
  ++held_;
  parent->held_forks.push_back(&fork);
}

void ScheduleState::remove(SequenceId id) {
  Sequence* sequence = find(id);
  if (sequence == nullptr || sequence->place == Place::ended) return;
  if (sequence->place == Place::running && under_way_) {
    sequence->place = Place::ended;
    ++ended_;
    return;
  }
  if (sequence->place == Place::running) stop_running(*sequence);
  erase(*sequence);
}

void ScheduleState::wait(Sequence& sequence) {
  sequence.place = Place::waiting;
  waiting_.insert(&sequence);
}

void ScheduleState::stop_running(Sequence& sequence) {
  running_.erase(std::ranges::find(running_, &sequence));
  give_back_blocks(sequence);
}

void ScheduleState::give_back_blocks(Sequence& sequence) {
  for (auto block = sequence.blocks.rbegin(); block != sequence.blocks.rend(); ++block) pool_.release(*block);
  sequence.blocks.clear();
  sequence.computed = sequence.scheduled = sequence.indexed = 0;
  sequence.guesses.clear();
  ++openings_;
}

/// Forget a sequence without blocks. Of its held forks the first now computes the prompt, and the others wait for it.
void ScheduleState::erase(Sequence& sequence) {
  if (sequence.place == Place::waiting) waiting_.erase(&sequence);
  if (sequence.place == Place::held) {
    --held_;
    std::erase(find(*sequence.parent)->held_forks, &sequence);
  }
  if (!sequence.held_forks.empty()) {
    Sequence& heir = *sequence.held_forks.front();
    heir.parent.reset();
    heir.held_forks.insert(heir.held_forks.end(), sequence.held_forks.begin() + 1, sequence.held_forks.end());
    for (Sequence* fork : heir.held_forks) fork->parent = heir.id;
    --held_;
    wait(heir);
  }
  if (refused_ == &sequence) refused_ = nullptr;
  sequences_.erase(sequence.id);
}

SchedulerCounts ScheduleState::counts() const {
  return {static_cast<std::int64_t>(waiting_.size()) + held_, static_cast<std::int64_t>(running_.size()), pool_.used(), preemptions_,
          shared_tokens_};
}

struct Scheduler::Impl : ScheduleState {
  using ScheduleState::ScheduleState;
};

Scheduler::Scheduler(const SchedulerOptions& options) : impl_(std::make_unique<Impl>(options)) {}
Scheduler::~Scheduler() = default;
void Scheduler::add(NewSequence sequence) { impl_->add(std::move(sequence)); }
void Scheduler::add_fork(SequenceId parent, SequenceId id) { impl_->add_fork(parent, id); }
void Scheduler::remove(SequenceId id) { impl_->remove(id); }
void Scheduler::propose(SequenceId id, std::span<const Token> guesses) { impl_->propose(id, guesses); }
std::int64_t Scheduler::most_guesses(SequenceId id) const { return impl_->most_guesses(id); }
std::int64_t Scheduler::spare_tokens() const { return impl_->spare_tokens(); }
Step Scheduler::next() { return impl_->next(); }
void Scheduler::finish_step(std::span<const Chosen> chosen) { impl_->finish_step(chosen); }
SchedulerCounts Scheduler::counts() const { return impl_->counts(); }
void Scheduler::check() const { impl_->check(); }

}  // namespace unshard::inference
