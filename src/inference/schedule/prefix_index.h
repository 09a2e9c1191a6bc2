#pragma once
// Which block holds the keys and values of which prefix, so that equal beginnings are computed once.
//
// [Note: why a hash collision can't share wrong blocks] A full block's keys and values depend on all tokens up to its end. An entry is
// found by the chain hash of these tokens, and believed only if its own tokens, its salt and the block before it are the wanted ones;
// the block before was believed on the same grounds. That comparison by block number is safe because no entry outlives the entry of the
// block before it: whoever uses a block uses the one before as well and releases it later (BlockPool::release), so it is evicted later.
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "unshard/inference/sampling.h"

namespace unshard::inference {

class PrefixIndex {
 public:
  static constexpr std::int32_t kNone = -1;

  /// \param hash_mask  bits of the hash that are used; fewer let tests make collisions
  PrefixIndex(std::int64_t blocks, std::int64_t block_tokens, std::uint64_t hash_mask = ~std::uint64_t{0});

  /// The chain hash before any token.
  std::uint64_t start(std::uint64_t salt) const;
  /// The chain hash after one block more. \param tokens  [block_tokens]
  std::uint64_t extend(std::uint64_t chain, std::span<const Token> tokens) const;

  /// What names a full block: its chain hash, the block before it (kNone for the first), salt and tokens [block_tokens].
  struct Key {
    std::uint64_t chain = 0;
    std::int32_t before = kNone;
    std::uint64_t salt = 0;
    std::span<const Token> tokens;
  };
  /// \return the block that holds this prefix, or kNone
  std::int32_t find(const Key& key) const;
  /// \return false: another prefix of equal chain hash is here already, which stays
  bool insert(const Key& key, std::int32_t block);
  void erase(std::int32_t block);

  std::int64_t size() const { return static_cast<std::int64_t>(by_chain_.size()); }
  bool holds(std::int32_t block) const;
  std::int32_t before(std::int32_t block) const { return entries_[static_cast<std::size_t>(block)].before; }

 private:
  struct Entry {
    std::uint64_t chain = 0, salt = 0;
    std::int32_t before = kNone;
  };
  std::span<const Token> tokens_of(std::int32_t block) const;

  std::int64_t block_tokens_;
  std::uint64_t hash_mask_;
  std::unordered_map<std::uint64_t, std::int32_t> by_chain_;
  std::vector<Entry> entries_;  ///< [blocks]
  std::vector<Token> tokens_;   ///< [blocks, block_tokens]
};

}  // namespace unshard::inference
