#include "inference/schedule/prefix_index.h"

#include <algorithm>

#include "unshard/core/error.h"

namespace unshard::inference {
namespace {

/// The finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit changes every output bit.
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

}  // namespace

PrefixIndex::PrefixIndex(std::int64_t blocks, std::int64_t block_tokens, std::uint64_t hash_mask)
    : block_tokens_(block_tokens),
      hash_mask_(hash_mask),
      entries_(static_cast<std::size_t>(blocks)),
      tokens_(static_cast<std::size_t>(blocks * block_tokens)) {}

std::uint64_t PrefixIndex::start(std::uint64_t salt) const { return mix(salt + 0x9e3779b97f4a7c15U) & hash_mask_; }

std::uint64_t PrefixIndex::extend(std::uint64_t chain, std::span<const Token> tokens) const {
  for (const Token token : tokens) chain = (chain ^ static_cast<std::uint32_t>(token)) * 0x9e3779b97f4a7c15U + (chain >> 29);
  return mix(chain) & hash_mask_;
}

std::span<const Token> PrefixIndex::tokens_of(std::int32_t block) const {
  return std::span(tokens_).subspan(static_cast<std::size_t>(block * block_tokens_), static_cast<std::size_t>(block_tokens_));
}

bool PrefixIndex::holds(std::int32_t block) const {
  const auto found = by_chain_.find(entries_[static_cast<std::size_t>(block)].chain);
  return found != by_chain_.end() && found->second == block;
}

std::int32_t PrefixIndex::find(const Key& key) const {
  const auto found = by_chain_.find(key.chain);
  if (found == by_chain_.end()) return kNone;
  const Entry& entry = entries_[static_cast<std::size_t>(found->second)];
  const bool same = entry.before == key.before && entry.salt == key.salt && std::ranges::equal(tokens_of(found->second), key.tokens);
  return same ? found->second : kNone;
}

bool PrefixIndex::insert(const Key& key, std::int32_t block) {
  if (!by_chain_.try_emplace(key.chain, block).second) return false;
  entries_[static_cast<std::size_t>(block)] = {key.chain, key.salt, key.before};
  std::ranges::copy(key.tokens, tokens_.begin() + block * block_tokens_);
  return true;
}

void PrefixIndex::erase(std::int32_t block) {
  UNSHARD_DCHECK(holds(block), "block ", block);
  by_chain_.erase(entries_[static_cast<std::size_t>(block)].chain);
}

}  // namespace unshard::inference
