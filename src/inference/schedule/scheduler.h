#pragma once
// Which sequences compute which tokens in the next step: a pure state machine over numbers, without model, memory or clock.
//
// [Note: a step's life] next() decides a step: chunks of prompts and one token of each running sequence, never more than the budget
// (Dynamic SplitFuse: long prompts in chunks, so that every step fills and none exceeds it). The caller first copies blocks as
// Step::copies says, computes, then tells finish_step() the token of each chunk that wanted one. Blocks of cancelled or ended sequences
// are free from then on.
//
// [Note: guesses] Between two steps propose() may guess what a sequence's next tokens are (speculative decoding). The next step computes
// them after the sequence's last token, as if they were chosen, so that it may end with several tokens. Nobody waits for guesses: they get
// what single tokens and prompts left of the budget, and blocks that nobody has. The cells of guesses that were not accepted are written
// again by the tokens that come there, their blocks are given back, and a block enters the prefix index only when all its tokens were
// accepted.
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "unshard/inference/sampling.h"

namespace unshard::inference {

struct SchedulerOptions {
  std::int64_t blocks = 0;  ///< KV blocks there are
  std::int64_t block_tokens = 16;
  std::int64_t step_tokens = 512;  ///< tokens of a step, at most
  /// A prompt's token with this many before it costs as much of step_tokens as two with none, as it looks back at all of them; so steps
  /// take equally long, wherever in its prompt a chunk is. 0: looking back costs nothing.
  std::int64_t look_back_tokens = 0;
  std::int64_t max_sequences = 256;
  bool share_prefixes = true;
};

using SequenceId = std::int64_t;

struct NewSequence {
  SequenceId id = 0;  ///< chosen by the caller, never used again
  std::vector<Token> prompt;
  std::int64_t max_tokens = 0;    ///< generated tokens at most; prompt + max_tokens fits in all blocks together (the caller checks)
  std::int64_t priority = 0;      ///< lower first
  std::uint64_t prefix_salt = 0;  ///< sequences of different salts share nothing
};

/// Tokens of one sequence in a step.
struct Chunk {
  SequenceId sequence = 0;
  std::int64_t position = 0;  ///< of the first token: tokens whose keys and values are there already
  std::vector<Token> tokens;
  std::vector<std::int32_t> blocks;  ///< the block table up to and including these tokens
  bool wants_token = false;          ///< the last token's logits give the sequence's next token
  std::int64_t drafts = 0;           ///< the last `drafts` of `tokens` are guesses: logits of the last 1 + drafts rows are wanted
};

struct Step {
  std::vector<Chunk> chunks;                                  ///< running sequences' single tokens first, then prompts
  std::vector<std::pair<std::int32_t, std::int32_t>> copies;  ///< blocks to copy before computing: from, to
  std::int64_t tokens = 0;                                    ///< of all chunks, guesses too
};

/// What the logits of a chunk with wants_token gave.
struct Chosen {
  SequenceId sequence = 0;
  std::vector<Token> tokens;  ///< 1 to 1 + drafts: the guesses that were accepted, in order from the first, then one of the model's own
};

struct SchedulerCounts {
  std::int64_t waiting = 0, running = 0, blocks_used = 0;  ///< blocks held by sequences (kept prefixes that nobody uses count as free)
  std::int64_t preemptions = 0, shared_tokens = 0;
};

class Scheduler {
 public:
  explicit Scheduler(const SchedulerOptions& options);
  ~Scheduler();
  void add(NewSequence sequence);
  /// A second sequence with the same prompt and nothing generated, which shares blocks with `parent` once the prompt is computed (n > 1).
  void add_fork(SequenceId parent, SequenceId id);
  /// The sequence ends now, or with the step under way. Unknown or ended ids are ignored.
  void remove(SequenceId id);
  /// Guesses at a sequence's next tokens, for the next next() only, between finish_step() and next(). In place of those proposed before.
  /// Fewer or none are taken where max_tokens, budget or blocks leave less room; a sequence with most_guesses() of 0 takes none.
  void propose(SequenceId id, std::span<const Token> guesses);
  /// How many guesses could be of use: one token less than may still come; 0 for a sequence that doesn't run, or lacks more than its last
  /// token.
  std::int64_t most_guesses(SequenceId id) const;
  /// Tokens that the next step has for guesses, unless waiting sequences are admitted: worth a look before making guesses.
  std::int64_t spare_tokens() const;
  /// \return empty chunks: nothing to do
  Step next();
  /// Tokens chosen for chunks of the last step that wanted one. A sequence that has reached its max_tokens doesn't end by itself: the
  /// caller removes it. Sequences removed meanwhile may be left out.
  void finish_step(std::span<const Chosen> chosen);
  SchedulerCounts counts() const;
  /// Every invariant that can be checked from inside (blocks conserved, counts right). For tests. \throws std::logic_error
  void check() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace unshard::inference
