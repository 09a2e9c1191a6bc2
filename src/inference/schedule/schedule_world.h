#pragma once
// For tests only: a scheduler driven by random programs, beside a simulated cache and a record of what each sequence must hold.
//
// A cell of the cache holds the token, its position and the hash of everything before it (and the salt). Every chunk must read, through its
// block table and after copies and writes of the step, exactly the cells of its sequence. The next token is a function of what was read, so
// that an answer equals the solo run's only if every read was right. Guesses are made from the solo run, some of them wrong, and some of
// those that are right aren't accepted.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <unordered_set>

#include "inference/schedule/schedule_state.h"

namespace unshard::inference {

/// What the promises of the scheduler are checked against, seen from inside.
struct ScheduleView {
  const ScheduleState& state;
  const std::vector<Sequence*>& running() const { return state.running_; }
  const std::set<Sequence*, Before>& waiting() const { return state.waiting_; }
  const BlockPool& pool() const { return state.pool_; }
  const PrefixIndex& index() const { return state.index_; }
  std::int64_t max_running() const { return state.max_running_; }
};

class ScheduleWorld {
 public:
  ScheduleWorld(const SchedulerOptions& options, std::uint64_t hash_mask, std::uint32_t seed)
      : options_(options), state_(options, hash_mask), cells_(options.blocks * options.block_tokens), random_(seed) {}

  void add(std::vector<Token> prompt, std::int64_t max_tokens, std::int64_t priority, std::uint64_t salt) {
    const SequenceId id = ++last_id_;
    state_.add({id, prompt, max_tokens, priority, salt});
    record(id, std::move(prompt), max_tokens, salt);
  }
  void fork(SequenceId parent) {
    const SequenceId id = ++last_id_;
    state_.add_fork(parent, id);
    const Track& track = tracks_.at(parent);
    record(id, {track.tokens.begin(), track.tokens.begin() + track.prompt}, track.max_tokens, track.salt);
  }
  void remove(SequenceId id) {
    state_.remove(id);
    tracks_.erase(id);
  }
  /// Any sequence that is still there; 0: none.
  SequenceId any() {
    if (tracks_.empty()) return 0;
    return std::next(tracks_.begin(), static_cast<std::ptrdiff_t>(random_() % tracks_.size()))->first;
  }

  /// Guess for about half of all sequences, whatever state they are in.
  void guess() {
    for (const auto& [id, track] : tracks_) {
      if (random_() % 2) continue;
      std::vector<Token> guesses(random_() % 8);
      const std::size_t right = random_() % 8;
      for (std::size_t i = 0; i < guesses.size(); ++i) {
        const auto& solo = solo_.at(id).tokens;
        const std::size_t at = track.tokens.size() + i;
        guesses[i] = i < right && at < solo.size() ? solo[at] : static_cast<Token>(random_() % 3);
      }
      state_.propose(id, guesses);
    }
    state_.check();
  }
  /// One step with all its checks. \param removals  sequences removed while it is under way
  void step(int removals = 0) {
    Ran ran;
    for (const Sequence* now : view().running()) ran[now] = now->computed;
    const Step step = state_.next();
    state_.check();
    check_promises(step, ran);
    for (int i = 0; i < removals; ++i) remove(any());
    compute(step);
    state_.check();
    state_.finish_step(chosen_);
    state_.check();
    check_index();
    end_finished();
    state_.check();
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(cells_.size()); ++i) {
      if (view().pool().state(static_cast<std::int32_t>(i / options_.block_tokens)) == BlockState::free) cells_[i] = {};
    }
    ++steps;
  }
  bool idle() const { return tracks_.empty(); }
  ScheduleState& state() { return state_; }
  ScheduleView view() const { return {state_}; }

  std::int64_t steps = 0, finished = 0, full_steps = 0, guessed = 0, accepted = 0, prompts_at_once = 0;

 private:
  struct Cell {
    Token token = -1;
    std::int64_t position = -1;
    std::uint64_t prefix = 0;
    bool operator==(const Cell&) const = default;
  };
  struct Track {
    std::vector<Token> tokens;
    std::vector<std::uint64_t> prefix;  ///< [tokens + 1]: hash of salt and the tokens before
    std::int64_t prompt = 0, max_tokens = 0;
    std::uint64_t salt = 0;
  };

  using Ran = std::map<const Sequence*, std::int64_t>;  ///< those that ran before a step, and what of them was computed

  static std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
    std::uint64_t x = (a ^ (b + 0x1234567)) * 0x9e3779b97f4a7c15U;
    x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93U;
    return x ^ (x >> 32);
  }
  /// The sampled token: of the whole prefix and the sequence's own seed. Few values, so that outputs share prefixes too.
  static Token answer(std::uint64_t prefix, SequenceId id) { return static_cast<Token>(mix(prefix, static_cast<std::uint64_t>(id)) % 3); }
  static std::uint64_t after(std::uint64_t prefix, Token token) { return mix(prefix, static_cast<std::uint64_t>(token) + 1); }
  static void append(Track& track, Token token) {
    track.tokens.push_back(token);
    track.prefix.push_back(after(track.prefix.back(), token));
  }
  void record(SequenceId id, const std::vector<Token>& prompt, std::int64_t max_tokens, std::uint64_t salt) {
    Track track;
    track.prompt = static_cast<std::int64_t>(prompt.size());
    track.max_tokens = max_tokens;
    track.salt = salt;
    track.prefix.push_back(salt);
    for (const Token token : prompt) append(track, token);
    verified_.insert(track.prefix.begin(), track.prefix.end());
    tracks_[id] = std::move(track);
    since_[id] = prompt_tokens_;
    solo_[id] = tracks_[id];
    for (std::int64_t i = 0; i < max_tokens; ++i) append(solo_[id], answer(solo_[id].prefix.back(), id));
  }

  Cell& cell(const Chunk& chunk, std::int64_t position) {
    const std::int64_t size = options_.block_tokens;
    return cells_.at(static_cast<std::size_t>(chunk.blocks.at(static_cast<std::size_t>(position / size)) * size + position % size));
  }

  void compute(const Step& step) {
    copy_blocks(step);
    chosen_.clear();
    std::set<const Cell*> written;
    for (const Chunk& chunk : step.chunks) {
      const Track& solo = solo_.at(chunk.sequence);
      const auto own = static_cast<std::int64_t>(chunk.tokens.size()) - chunk.drafts;
      std::uint64_t prefix = solo.prefix[static_cast<std::size_t>(chunk.position)];
      for (std::int64_t i = 0; i < own + chunk.drafts; ++i) {
        const std::int64_t position = chunk.position + i;
        const Token token = chunk.tokens[static_cast<std::size_t>(i)];
        if (i < own) {
          ASSERT_EQ(token, solo.tokens.at(static_cast<std::size_t>(position)));
        }
        Cell& target = cell(chunk, position);
        ASSERT_TRUE(written.insert(&target).second) << "two writes to one cell";
        target = {token, position, prefix};
        prefix = after(prefix, token);
      }
    }
    for (const Chunk& chunk : step.chunks) ASSERT_NO_FATAL_FAILURE(read(chunk));
  }
  void read(const Chunk& chunk) {
    const Track& solo = solo_.at(chunk.sequence);
    const std::int64_t all = chunk.position + static_cast<std::int64_t>(chunk.tokens.size()), size = options_.block_tokens;
    const std::int64_t end = all - chunk.drafts;
    ASSERT_EQ(static_cast<std::int64_t>(chunk.blocks.size()), (all + size - 1) / size);
    std::uint64_t prefix = solo.salt;
    for (std::int64_t p = 0; p < end; ++p) {
      const Cell& found = cell(chunk, p);
      ASSERT_EQ(found.token, solo.tokens[static_cast<std::size_t>(p)]) << "sequence " << chunk.sequence << " position " << p;
      ASSERT_EQ(found.position, p);
      ASSERT_EQ(found.prefix, prefix);
      prefix = after(prefix, found.token);
    }
    const auto track = tracks_.find(chunk.sequence);
    if (track == tracks_.end()) {  // removed meanwhile: its token may come or not
      if (chunk.wants_token && random_() % 2) chosen_.push_back({chunk.sequence, {0}});
      return;
    }
    ASSERT_EQ(chunk.wants_token, end == static_cast<std::int64_t>(track->second.tokens.size()));
    if (chunk.wants_token) choose(chunk, track->second, prefix);
  }
  /// Guesses that are what the model says, up to a random one, and then what it says.
  void choose(const Chunk& chunk, Track& track, std::uint64_t prefix) {
    ASSERT_LE(static_cast<std::int64_t>(track.tokens.size()) + chunk.drafts + 1, track.prompt + track.max_tokens);
    std::vector<Token> tokens{answer(prefix, chunk.sequence)};
    for (std::int64_t i = 0; i < chunk.drafts && random_() % 8 != 0; ++i) {
      const Cell& guess = cell(chunk, chunk.position + static_cast<std::int64_t>(chunk.tokens.size()) - chunk.drafts + i);
      ASSERT_EQ(guess.prefix, prefix);
      if (guess.token != tokens.back()) break;
      prefix = after(prefix, guess.token);
      tokens.push_back(answer(prefix, chunk.sequence));
    }
    for (const Token token : tokens) append(track, token);
    verified_.insert(track.prefix.end() - static_cast<std::ptrdiff_t>(tokens.size()), track.prefix.end());
    guessed += chunk.drafts;
    accepted += static_cast<std::int64_t>(tokens.size()) - 1;
    chosen_.push_back({chunk.sequence, std::move(tokens)});
  }
  /// What the prefix index knows are prefixes of prompts and chosen tokens, never of guesses.
  void check_index() {
    for (std::int32_t b = 0; b < options_.blocks; ++b) {
      if (!view().index().holds(b)) continue;
      for (std::int64_t i = b * options_.block_tokens; i < (b + 1) * options_.block_tokens; ++i) {
        const Cell& found = cells_[static_cast<std::size_t>(i)];
        ASSERT_TRUE(verified_.contains(after(found.prefix, found.token))) << "block " << b << " holds guesses";
      }
    }
  }
  void copy_blocks(const Step& step) {
    std::set<std::int32_t> from, to;
    for (const auto& [source, target] : step.copies) {
      from.insert(source);
      ASSERT_TRUE(to.insert(target).second);
      for (std::int64_t i = 0; i < options_.block_tokens; ++i) {
        cells_[target * options_.block_tokens + i] = cells_[source * options_.block_tokens + i];
      }
    }
    for (const auto block : from) ASSERT_FALSE(to.contains(block)) << "copies depend on their order";
  }

  void end_finished() {
    std::vector<SequenceId> done;
    for (const auto& [id, track] : tracks_) {
      if (static_cast<std::int64_t>(track.tokens.size()) == track.prompt + track.max_tokens) done.push_back(id);
    }
    for (const SequenceId id : done) {
      ASSERT_EQ(tracks_.at(id).tokens, solo_.at(id).tokens) << "differs from the solo run";
      ++finished;
      remove(id);
    }
  }

  void check_promises(const Step& step, const Ran& ran) {
    std::int64_t tokens = 0, guesses = 0;
    for (const Chunk& chunk : step.chunks) {
      const auto n = static_cast<std::int64_t>(chunk.tokens.size());
      ASSERT_GE(chunk.drafts, 0);
      ASSERT_GE(n - chunk.drafts, 1);
      ASSERT_TRUE(chunk.drafts == 0 || (chunk.wants_token && n == 1 + chunk.drafts));
      tokens += n - chunk.drafts;
      guesses += chunk.drafts;
    }
    ASSERT_EQ(step.tokens, tokens + guesses);
    ASSERT_LE(tokens + guesses, options_.step_tokens);
    ASSERT_TRUE(tokens > 0 || tracks_.empty()) << "nothing to do although sequences are there";
    full_steps += tokens == options_.step_tokens;
    ASSERT_TRUE(guesses == 0 || std::ranges::all_of(view().running(), [](const auto* now) { return now->remaining() == 0; }));
    ASSERT_NO_FATAL_FAILURE(check_nothing_more_fits());
    ASSERT_NO_FATAL_FAILURE(check_shares(ran));
    ASSERT_NO_FATAL_FAILURE(check_best_computes());
    // Nobody overtakes: all that were admitted now are better than all that still wait.
    for (const Sequence* now : view().running()) {
      if (ran.contains(now) || view().waiting().empty()) continue;
      ASSERT_TRUE(Before{}(now, *view().waiting().begin()));
    }
  }
  /// Single tokens are never held back by prompts, and [Note: how prompts share a step], claim by claim.
  void check_shares(const Ran& ran) {
    std::map<std::int64_t, std::vector<const Sequence*>> prompts;  // by priority, the oldest first
    const std::int64_t unit = std::max<std::int64_t>(options_.look_back_tokens, 1);
    std::int64_t budget = options_.step_tokens * unit;
    for (const Sequence* now : view().running()) {
      const std::int64_t shared = now->computed - (ran.contains(now) ? ran.at(now) : 0);
      since_.at(now->id) = std::min(prompt_tokens_, since_.at(now->id) + shared);
      if (ran.contains(now) && now->remaining() == 1) {
        ASSERT_GT(now->scheduled, 0) << "sequence " << now->id << " lacked one token, or was cut to it";
      }
      if (now->scheduled == 1 && now->remaining() == 0 && ran.contains(now)) {
        budget -= unit;
      } else if (now->scheduled + now->remaining() > 0) {
        prompts[now->priority].push_back(now);
      }
    }
    const auto due = [&](const Sequence* prompt) { return since_.at(prompt->id) + 4 * lacked(prompt); };
    const auto cost = [&](const Sequence* prompt) {
      const std::int64_t most = std::max(unit, options_.step_tokens * unit / 4);
      return options_.look_back_tokens == 0 ? unit : std::min(unit + prompt->computed, most);
    };
    for (const auto& [priority, group] : prompts) {
      const std::int64_t share = std::min(budget, std::max(budget / 4, cost(group.front())));
      const std::int64_t sure = std::max<std::int64_t>(share / cost(group.front()), budget >= unit);
      ASSERT_GE(group.front()->scheduled, std::min(sure, lacked(group.front()))) << "the oldest got less than its share";
      for (const Sequence* now : group) {
        std::int64_t earlier = 0;
        for (const Sequence* other : group) earlier += due(other) <= due(now) ? lacked(other) * cost(other) : 0;
        ASSERT_TRUE(earlier > budget - share || now->remaining() == 0) << "sequence " << now->id << " waits for later ones";
        prompts_at_once += now->remaining() == 0 && now != group.front();
      }
      for (const Sequence* now : group) {
        budget -= std::min(budget, now->scheduled * cost(now));
        prompt_tokens_ += now->scheduled;
        since_.at(now->id) += now->scheduled;
      }
    }
    for (const auto& [priority, group] : prompts) {
      for (const Sequence* now : group) ASSERT_TRUE(budget < cost(now) || now->remaining() == 0) << "a token more was paid for";
    }
  }
  static std::int64_t lacked(const Sequence* sequence) { return sequence->scheduled + sequence->remaining(); }
  /// [Note: when a step stays below its budget], claim by claim; a place counts as too small only if it is without sharing. Guesses don't
  /// count: what they took of the budget and of the blocks was of no use to others.
  void check_nothing_more_fits() {
    if (view().waiting().empty()) return;
    const Sequence& first = **view().waiting().begin();
    const std::int64_t size = options_.block_tokens, wanted = (first.length() + size - 1) / size;
    std::map<std::int32_t, std::int32_t> leaving;
    std::int64_t available = view().pool().available();
    for (const Sequence* now : view().running()) {
      available += std::max<std::int64_t>(0, static_cast<std::int64_t>(now->blocks.size()) - (now->length() + size - 1) / size);
    }
    for (auto stay = static_cast<std::int64_t>(view().running().size());; --stay) {
      ASSERT_TRUE(stay >= view().max_running() || available < wanted + stay) << "sequence " << first.id << " would fit";
      if (stay == 0 || view().running()[static_cast<std::size_t>(stay - 1)]->priority <= first.priority) return;
      const Sequence& leaves = *view().running()[static_cast<std::size_t>(stay - 1)];
      const auto held = std::min(static_cast<std::int64_t>(leaves.blocks.size()), (leaves.length() + size - 1) / size);
      for (std::int64_t i = 0; i < held; ++i) {
        const std::int32_t block = leaves.blocks[static_cast<std::size_t>(i)];
        available += ++leaving[block] == view().pool().users(block);
      }
    }
  }
  void check_best_computes() {
    if (view().running().empty()) return;
    const Sequence* best = view().running().front();
    if (!view().waiting().empty() && Before{}(*view().waiting().begin(), best)) {
      ASSERT_EQ(best->priority, (*view().waiting().begin())->priority) << "a better one waits while only worse ones run";
    }
    ASSERT_GT(best->scheduled, 0) << "the best sequence stands still";
  }

  SchedulerOptions options_;
  ScheduleState state_;
  std::vector<Cell> cells_;
  std::map<SequenceId, Track> tracks_;  ///< that are there
  std::map<SequenceId, Track> solo_;    ///< every one ever, with all its answers
  std::vector<Chosen> chosen_;
  std::unordered_set<std::uint64_t> verified_;  ///< hashes of all prefixes of prompts and chosen tokens
  std::mt19937 random_;
  SequenceId last_id_ = 0;
  std::int64_t prompt_tokens_ = 0;
  std::map<SequenceId, std::int64_t> since_;
};

}  // namespace unshard::inference
