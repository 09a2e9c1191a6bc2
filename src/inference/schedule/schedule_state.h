#pragma once
// The scheduler's state and its moves, in files: scheduler.cc (sequences come and go), admission.cc (waiting -> running and back),
// step.cc (next), guesses.cc (propose), finish.cc (finish_step), and check.cc.
//
// [Note: blocks are taken for the whole prompt at once] A sequence is admitted when blocks for all its tokens are there, and one more for
// each sequence that runs already (which may each need one within the next block_tokens steps). So a prompt never stops half way for want
// of blocks, only a single token can fail to find one, and what was admitted is seldom preempted soon after.
//
// [Note: who waits for whom] `Before` orders all sequences.
//  - Running, out of blocks for its next token: the worst running sequence is preempted, itself if it is the worst. So the best running
//    sequence computes in every step (at most step_tokens sequences run, and single tokens go first): no livelock.
//  - Waiting sequences are admitted strictly in order: none is ever overtaken by a worse one while it waits. A fork begins to wait when its
//    parent's prompt is computed. What can delay a waiting sequence is: better ones, and at most max_sequences of equal priority that ran
//    before it began to wait; these end, as they progress and have max_tokens.
//  - Sequences of strictly worse priority are preempted for a waiting one where that makes it fit, and not otherwise.
//
// [Note: how prompts share a step] All who wait and find a place are admitted, whether or not any budget is left for them. What single
// tokens leave of the budget, B, goes to prompts: those of the best priority first. Of one priority the oldest (first come) is sure of a
// quarter of B, and of one token at least; all else goes to those that are due first. Due first are those that lack the fewest tokens, but
// four tokens computed of others' prompts while a prompt waits count as one less that it lacks: none is overtaken for long.
//  - Short prompts don't wait for long ones: a prompt gets its first token in the step that admits it if it and those due no later (of its
//    priority, and all of better ones) fit in what the oldest's share leaves of B. So does every prompt of at most three quarters of B
//    beside a long one that lacks more. And it is admitted in the first step after it came, unless places or blocks are lacking: its first
//    token comes within two steps' time.
//  - No prompt starves: while it is the oldest of its priority it gets its share in every step, whatever comes after it, and those before
//    it end. B is at least 1, as at most step_tokens sequences run.
//  - Of equal prompts that come together one is computed, as it is the oldest and due first; the others share its blocks as these fill.
//
// [Note: what a token costs] A single token or a guess costs 1 of the budget. A prompt's token costs 1 + (tokens before its chunk) /
// look_back_tokens, at most a quarter of a step: attention makes late chunks of long prompts slower, and the time between two tokens of
// those that run is to be even.
// So a step never has more than step_tokens tokens, and fewer where it computes late parts of long prompts. (What single tokens look back
// on isn't counted: it changes little from step to step, and could leave nothing to prompts.)
//
// [Note: when a step stays below its budget] Only if every running sequence computes all the tokens it has. The first waiting one (if any)
// found no place: min(max_sequences, step_tokens) run already, or too few blocks are available. It isn't tried again before blocks or a
// place were given back.
#include <set>
#include <unordered_map>

#include "inference/schedule/block_pool.h"
#include "inference/schedule/prefix_index.h"
#include "inference/schedule/scheduler.h"
#include "inference/schedule/sequence.h"

namespace unshard::inference {

class ScheduleState {
 public:
  /// \param hash_mask  as in PrefixIndex
  explicit ScheduleState(const SchedulerOptions& options, std::uint64_t hash_mask = ~std::uint64_t{0});
  void add(NewSequence sequence);
  void add_fork(SequenceId parent, SequenceId id);
  void remove(SequenceId id);
  void propose(SequenceId id, std::span<const Token> guesses);
  std::int64_t most_guesses(SequenceId id) const;
  std::int64_t spare_tokens() const;
  Step next();
  void finish_step(std::span<const Chosen> chosen);
  SchedulerCounts counts() const;
  void check() const;

 private:
  friend struct ScheduleView;  // tests

  // scheduler.cc
  Sequence* find(SequenceId id) const;
  Sequence& create(SequenceId id);
  void wait(Sequence& sequence);
  void stop_running(Sequence& sequence);
  void give_back_blocks(Sequence& sequence);
  void erase(Sequence& sequence);

  // admission.cc
  std::int32_t take_block();
  void admit_waiting();
  bool admit(Sequence& sequence);
  bool make_room(const Sequence& sequence, std::int64_t blocks);
  void share_prefix(Sequence& sequence);
  void share_more(Sequence& sequence);
  void count_shared(Sequence& sequence, std::int64_t tokens);
  const Sequence* parent_to_share(const Sequence& sequence) const;
  void preempt_worst();

  // step.cc
  void schedule(Sequence& sequence, std::int64_t tokens, std::int64_t cost);
  void schedule_prompt(Sequence& prompt, std::int64_t budget);
  void schedule_single_tokens();
  bool ensure_block(Sequence& sequence);
  void schedule_prompts();
  void share_budget(std::vector<Sequence*>& prompts);
  std::int64_t prompt_token_cost(const Sequence& prompt) const;
  Chunk chunk_of(const Sequence& sequence) const;

  // guesses.cc
  void schedule_guesses();
  std::int64_t take_guesses(Sequence& sequence, std::int64_t most);
  void give_back_blocks_of_guesses(Sequence& sequence);

  // finish.cc
  void check_chosen(std::span<const Chosen> chosen);
  void commit(Sequence& sequence);
  void index_full_blocks(Sequence& sequence);
  PrefixIndex::Key next_to_index(const Sequence& sequence) const;
  void share_next(Sequence& sequence, const PrefixIndex::Key& next, std::int32_t block);

  // check.cc
  void check_sequence(const Sequence& sequence) const;
  void check_blocks() const;

  SchedulerOptions options_;
  std::int64_t token_cost_;  ///< of a single token, in the budget's unit
  std::int64_t max_running_;
  BlockPool pool_;
  PrefixIndex index_;
  std::unordered_map<SequenceId, std::unique_ptr<Sequence>> sequences_;
  std::set<Sequence*, Before> waiting_;
  std::vector<Sequence*> running_;    ///< in order, best first
  std::vector<Sequence*> scheduled_;  ///< chunks of the step under way, in their order
  std::vector<std::pair<std::int32_t, std::int32_t>> copies_;
  std::vector<std::int32_t> leaving_;  ///< scratch of make_room(): users that a block would lose, by block
  std::int64_t budget_ = 0;            ///< what is left of the step being planned, token_cost_ for each of step_tokens
  std::int64_t prompt_tokens_ = 0;     ///< of prompts that were scheduled
  std::int64_t arrivals_ = 0, held_ = 0, ended_ = 0, preemptions_ = 0, shared_tokens_ = 0;
  std::int64_t openings_ = 0;          ///< times blocks or a place may have become available
  const Sequence* refused_ = nullptr;  ///< the waiting sequence that found no place when openings_ was refused_at_
  std::int64_t refused_at_ = -1;
  bool under_way_ = false;
};

}  // namespace unshard::inference
