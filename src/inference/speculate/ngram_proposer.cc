#include "inference/speculate/ngram_proposer.h"

#include <algorithm>

namespace unshard::inference {
namespace {

/// Of splitmix64 (Steele, Lea, Flood 2014): every bit of the token reaches every bit of the hash.
std::uint64_t mix(std::uint64_t hash, Token token) {
  hash += 0x9e3779b97f4a7c15u + static_cast<std::uint32_t>(token);
  hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9u;
  hash = (hash ^ (hash >> 27)) * 0x94d049bb133111ebu;
  return hash ^ (hash >> 31);
}

}  // namespace

/// Of the last 1, 2, ... kLongest tokens, as far as there are so many.
NgramIndex::Hashes NgramIndex::hashes_of_end() const {
  Hashes hashes;
  std::uint64_t hash = 0;
  for (auto token = tokens_.rbegin(); token != tokens_.rend() && hashes.count < kLongest; ++token) {
    hash = mix(hash, *token);
    hashes.values[static_cast<std::size_t>(hashes.count)] = mix(hash, static_cast<Token>(hashes.count));  // lengths don't mix
    ++hashes.count;
  }
  return hashes;
}

void NgramIndex::append(Token token) {
  const auto hashes = hashes_of_end();  // the n-grams that `token` follows
  for (const auto hash : hashes.all()) followed_[hash] = static_cast<std::int32_t>(tokens_.size());
  tokens_.push_back(token);
}

NgramIndex::Match NgramIndex::find() const {
  const auto hashes = hashes_of_end();
  for (std::int64_t n = hashes.count; n > 0; --n) {
    const auto found = followed_.find(hashes.values[static_cast<std::size_t>(n - 1)]);
    if (found == followed_.end()) continue;
    Match match{0, found->second};
    const auto longest = std::min<std::int64_t>(kMatch, match.next);
    const auto end = static_cast<std::int64_t>(tokens_.size());
    while (match.length < longest && at(match.next - 1 - match.length) == at(end - 1 - match.length)) ++match.length;
    if (match.length > 0) return match;
  }
  return {};
}

std::vector<Token> NgramIndex::read(const Match& match, std::int64_t most) const {
  std::vector<Token> guesses;
  if (match.length == 0) return guesses;
  const auto end = static_cast<std::int64_t>(tokens_.size());
  for (std::int64_t i = 0; i < most; ++i) {
    const auto from = match.next + i;
    guesses.push_back(from < end ? at(from) : guesses[static_cast<std::size_t>(from - end)]);
  }
  return guesses;
}

void NgramProposer::add(SequenceId id, std::span<const Token> prompt) {
  auto& index = sequences_[id];
  for (const auto token : prompt) index.append(token);
}

void NgramProposer::propose(std::span<Proposal> proposals) {
  for (auto& proposal : proposals) {
    const auto& index = sequences_.at(proposal.sequence);
    const auto match = index.find();
    proposal.match = match.length;
    proposal.tokens = index.read(match, proposal.most);
  }
}

}  // namespace unshard::inference
