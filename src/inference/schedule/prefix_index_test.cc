// Facts about the prefix index, with and without collisions.
#include "inference/schedule/prefix_index.h"

#include <gtest/gtest.h>

#include <set>

namespace unshard::inference {
namespace {

constexpr auto kNone = PrefixIndex::kNone;

TEST(PrefixIndex, FindsABlockByAllThatNamesIt) {
  PrefixIndex index(8, 2);
  const std::vector<Token> tokens{5, 6};
  const auto chain = index.extend(index.start(7), tokens);
  EXPECT_EQ(index.find({chain, kNone, 7, tokens}), kNone);
  EXPECT_TRUE(index.insert({chain, kNone, 7, tokens}, 3));
  EXPECT_EQ(index.find({chain, kNone, 7, tokens}), 3);
  EXPECT_TRUE(index.holds(3));
  index.erase(3);
  EXPECT_EQ(index.find({chain, kNone, 7, tokens}), kNone);
  EXPECT_FALSE(index.holds(3));
  EXPECT_THROW(index.erase(3), std::logic_error);
}

TEST(PrefixIndex, ACollisionOfHashesIsNeverAHit) {
  PrefixIndex index(8, 2, 0);  // every hash is 0
  const std::vector<Token> tokens{5, 6}, other{6, 5};
  const auto chain = index.extend(index.start(7), tokens);
  ASSERT_EQ(chain, index.extend(index.start(8), other));
  ASSERT_TRUE(index.insert({chain, 2, 7, tokens}, 3));
  EXPECT_EQ(index.find({chain, 2, 7, tokens}), 3);
  EXPECT_EQ(index.find({chain, 2, 7, other}), kNone);   // tokens
  EXPECT_EQ(index.find({chain, 2, 8, tokens}), kNone);  // salt
  EXPECT_EQ(index.find({chain, 1, 7, tokens}), kNone);  // what lies before
  EXPECT_FALSE(index.insert({chain, 2, 7, other}, 4));
  EXPECT_EQ(index.find({chain, 2, 7, tokens}), 3);
}

TEST(PrefixIndex, HashesOfDifferentPrefixesDiffer) {
  PrefixIndex index(1, 3);
  std::set<std::uint64_t> seen;
  std::size_t made = 0;
  for (std::uint64_t salt = 0; salt < 4; ++salt) {
    for (Token a = -3; a < 20; ++a) {
      for (Token b = 0; b < 20; ++b) {
        for (Token c = 0; c < 20; ++c, ++made) seen.insert(index.extend(index.start(salt), std::vector<Token>{a, b, c}));
      }
    }
  }
  EXPECT_EQ(seen.size(), made);  // 36,800 of 2^64: a good hash collides with probability 4e-11
}

}  // namespace
}  // namespace unshard::inference
