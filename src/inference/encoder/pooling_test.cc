#include "inference/encoder/pooling.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace unshard::inference {
namespace {

using testing::ElementsAre;

const std::vector<float> kRows = {3, -4, 0, 1, 8, -2, 2, 2, -1};  // [3, 3]; sums are exact

std::vector<float> pooled(Pooling pooling, bool normalise, std::int64_t tokens = 3) {
  std::vector<float> out(3, -7);
  pool(kRows.data(), tokens, 3, pooling, normalise, out.data());
  return out;
}

TEST(Pooling, TakesTheMeanTheFirstRowOrTheLargestOfEachFeature) {
  EXPECT_THAT(pooled(Pooling::mean, false), ElementsAre(2, 2, -1));
  EXPECT_THAT(pooled(Pooling::cls, false), ElementsAre(3, -4, 0));
  EXPECT_THAT(pooled(Pooling::max, false), ElementsAre(3, 8, 0));
}

TEST(Pooling, OfOneTokenIsItsRow) {
  for (const Pooling pooling : {Pooling::mean, Pooling::cls, Pooling::max}) EXPECT_THAT(pooled(pooling, false, 1), ElementsAre(3, -4, 0));
}

TEST(Pooling, NormalisesToLengthOne) {
  EXPECT_THAT(pooled(Pooling::cls, true), ElementsAre(0.6F, -0.8F, 0));
  EXPECT_THAT(pooled(Pooling::mean, true), ElementsAre(2.0F / 3, 2.0F / 3, -1.0F / 3));
}

TEST(Pooling, ZerosStayZeros) {
  const std::vector<float> zeros(3);
  std::vector<float> out(3, 5);
  pool(zeros.data(), 1, 3, Pooling::mean, true, out.data());
  EXPECT_THAT(out, ElementsAre(0, 0, 0));
}

}  // namespace
}  // namespace unshard::inference
