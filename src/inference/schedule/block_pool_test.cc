// Facts about the pool of blocks.
#include "inference/schedule/block_pool.h"

#include <gtest/gtest.h>

#include <set>

namespace unshard::inference {
namespace {

TEST(BlockPool, GivesOutEachBlockOnceAndThenNone) {
  BlockPool pool(5);
  std::set<std::int32_t> taken;
  for (int i = 0; i < 5; ++i) {
    const auto got = pool.take();
    EXPECT_FALSE(got.evicted);
    taken.insert(got.block);
    pool.check();
  }
  EXPECT_EQ(taken, (std::set<std::int32_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(pool.take().block, -1);
  EXPECT_EQ(pool.available(), 0);
}

TEST(BlockPool, ABlockIsInUseUntilItsLastUserReleasesIt) {
  BlockPool pool(1);
  const auto block = pool.take().block;
  pool.retain(block);
  pool.release(block);
  EXPECT_EQ(pool.take().block, -1);
  pool.release(block);
  EXPECT_EQ(pool.take().block, block);
}

TEST(BlockPool, KeptBlocksGoOnlyWhenNoFreeOneIsLeftLeastRecentlyUsedFirst) {
  BlockPool pool(4);
  std::int32_t b[4];
  for (auto& block : b) block = pool.take().block;
  for (const int i : {2, 0, 1}) {
    pool.mark_known(b[i]);
    pool.release(b[i]);
  }
  pool.release(b[3]);
  EXPECT_EQ(pool.used(), 0);
  pool.retain(b[2]);  // used again: now the newest
  pool.release(b[2]);
  pool.check();
  const auto first = pool.take();
  EXPECT_EQ(first.block, b[3]);
  EXPECT_FALSE(first.evicted);
  for (const int i : {0, 1, 2}) {
    const auto next = pool.take();
    EXPECT_EQ(next.block, b[i]);
    EXPECT_TRUE(next.evicted);
    EXPECT_FALSE(pool.known(next.block));
    pool.check();
  }
}

TEST(BlockPool, MisuseIsABugReport) {
  BlockPool pool(2);
  EXPECT_THROW(pool.release(0), std::logic_error);
  EXPECT_THROW(pool.retain(0), std::logic_error);
  EXPECT_THROW(pool.mark_known(1), std::logic_error);
}

}  // namespace
}  // namespace unshard::inference
