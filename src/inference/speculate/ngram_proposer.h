#pragma once
// Prompt lookup: what followed the last time these tokens came, in the prompt or in the output. Helps where the output repeats its input
// (summaries, corrections, code, answers from documents) or itself.
// Source: the idea of prompt lookup decoding (A. Saxena, 2023).
#include <array>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "inference/speculate/proposer.h"

namespace unshard::inference {

/// The tokens of one sequence, and where each n-gram of them came last.
class NgramIndex {
 public:
  NgramIndex() = default;
  /// Goes on after the tokens of another, which doesn't grow any more and may be the beginning of many.
  explicit NgramIndex(std::shared_ptr<const NgramIndex> beginning) : beginning_(std::move(beginning)), begun_(beginning_->size()) {}
  std::int64_t size() const { return begun_ + static_cast<std::int64_t>(tokens_.size()); }
  static constexpr std::int64_t kLongest = 4;  ///< tokens of an n-gram
  static constexpr std::int64_t kMatch = 16;   ///< a match is measured up to this length
  /// Cost: O(kLongest); about 40 bytes for each n-gram not seen before.
  void append(Token token);
  struct Match {
    std::int64_t length = 0;  ///< last tokens that came before too; 0: none did
    std::int64_t next = 0;    ///< position of what followed them
  };
  /// The latest earlier place of the longest n-gram that ends the sequence, and how far the tokens before it are equal too.
  Match find() const;
  /// What followed, `most` tokens; at the end of the sequence the guesses themselves are read on, so that a period goes on.
  std::vector<Token> read(const Match& match, std::int64_t most) const;

 private:
  struct Hashes {
    std::array<std::uint64_t, kLongest> values{};
    std::int64_t count = 0;
    std::span<const std::uint64_t> all() const { return std::span(values).first(static_cast<std::size_t>(count)); }
  };
  Hashes hashes_of_end() const;
  Token at(std::int64_t position) const {
    return position < begun_ ? beginning_->at(position) : tokens_[static_cast<std::size_t>(position - begun_)];
  }
  /// Where the n-gram of this hash was followed last, or -1.
  std::int64_t place_of(std::uint64_t hash) const;

  std::shared_ptr<const NgramIndex> beginning_;
  std::int64_t begun_ = 0;                                    ///< its tokens
  std::vector<Token> tokens_;                                 ///< those that follow
  std::unordered_map<std::uint64_t, std::int32_t> followed_;  ///< hash of an n-gram -> position after its last place, below the end
};

/// [Note: who has an index] An index takes 40 times a token's bytes, and thousands of sequences may wait: a prompt is indexed when the
/// first of its sequences has a token, and once for all that have this prompt (the n of a request above all).
class NgramProposer : public Proposer {
 public:
  void add(SequenceId id, std::span<const Token> prompt) override;
  void append(SequenceId id, Token token) override { index_of(id).append(token); }
  void remove(SequenceId id) override { sequences_.erase(id); }
  void propose(std::span<Proposal> proposals) override;
  /// Prompts that have an index, for tests.
  std::int64_t indexed_prompts() const;

 private:
  struct Prompt {
    std::vector<Token> tokens;
    std::shared_ptr<const NgramIndex> index;  ///< null until it is wanted
  };
  struct Sequence {
    std::shared_ptr<Prompt> prompt;
    NgramIndex index;  ///< of nothing until a token comes
  };
  NgramIndex& index_of(SequenceId id);

  std::unordered_map<SequenceId, Sequence> sequences_;
  std::weak_ptr<Prompt> latest_;
};

}  // namespace unshard::inference
