#include "inference/speculate/ngram_proposer.h"

#include <algorithm>
#include <unordered_set>

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
  for (auto position = size() - 1; position >= 0 && hashes.count < kLongest; --position) {
    hash = mix(hash, at(position));
    hashes.values[static_cast<std::size_t>(hashes.count)] = mix(hash, static_cast<Token>(hashes.count));  // lengths don't mix
    ++hashes.count;
  }
  return hashes;
}

void NgramIndex::append(Token token) {
  const auto hashes = hashes_of_end();  // the n-grams that `token` follows
  for (const auto hash : hashes.all()) followed_[hash] = static_cast<std::int32_t>(size());
  tokens_.push_back(token);
}

std::int64_t NgramIndex::place_of(std::uint64_t hash) const {
  if (const auto found = followed_.find(hash); found != followed_.end()) return found->second;
  return beginning_ ? beginning_->place_of(hash) : -1;
}

NgramIndex::Match NgramIndex::find() const {
  const auto hashes = hashes_of_end();
  for (std::int64_t n = hashes.count; n > 0; --n) {
    const auto place = place_of(hashes.values[static_cast<std::size_t>(n - 1)]);
    if (place < 0) continue;
    Match match{0, place};
    const auto longest = std::min<std::int64_t>(kMatch, match.next);
    const auto end = size();
    while (match.length < longest && at(match.next - 1 - match.length) == at(end - 1 - match.length)) ++match.length;
    if (match.length > 0) return match;
  }
  return {};
}

std::vector<Token> NgramIndex::read(const Match& match, std::int64_t most) const {
  std::vector<Token> guesses;
  if (match.length == 0) return guesses;
  const auto end = size();
  for (std::int64_t i = 0; i < most; ++i) {
    const auto from = match.next + i;
    guesses.push_back(from < end ? at(from) : guesses[static_cast<std::size_t>(from - end)]);
  }
  return guesses;
}

void NgramProposer::add(SequenceId id, std::span<const Token> prompt) {
  auto shared = latest_.lock();
  if (!shared || !std::ranges::equal(shared->tokens, prompt)) {
    shared = std::make_shared<Prompt>(Prompt{{prompt.begin(), prompt.end()}, nullptr});
    latest_ = shared;
  }
  sequences_[id].prompt = std::move(shared);
}

NgramIndex& NgramProposer::index_of(SequenceId id) {
  auto& [prompt, index] = sequences_.at(id);
  if (index.size() > 0) return index;
  if (!prompt->index) {
    auto made = std::make_shared<NgramIndex>();
    for (const auto token : prompt->tokens) made->append(token);
    prompt->index = std::move(made);
  }
  return index = NgramIndex(prompt->index);
}

std::int64_t NgramProposer::indexed_prompts() const {
  std::unordered_set<const NgramIndex*> found;
  for (const auto& [id, sequence] : sequences_)
    if (sequence.prompt->index) found.insert(sequence.prompt->index.get());
  return std::ssize(found);
}

void NgramProposer::propose(std::span<Proposal> proposals) {
  for (auto& proposal : proposals) {
    const auto& index = index_of(proposal.sequence);
    const auto match = index.find();
    proposal.match = match.length;
    proposal.tokens = index.read(match, proposal.most);
  }
}

}  // namespace unshard::inference
