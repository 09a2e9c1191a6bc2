#include "zero/occupancy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace unshard::zero {
namespace {

TEST(Occupancy, WithoutPlacesNothingIsOccupied) {
  const Occupancy occupancy({});
  EXPECT_EQ(occupancy.most(), 0);
  EXPECT_EQ(occupancy.room_before(0, 0, 5), 0U);
}

class RandomOccupancy : public testing::TestWithParam<unsigned> {};

TEST_P(RandomOccupancy, EqualsAPlainRow) {
  std::mt19937 random(GetParam());
  std::vector<std::int64_t> row(1 + random() % 70);
  for (auto& amount : row) amount = random() % 50;
  Occupancy occupancy(row);
  for (int i = 0; i < 200; ++i) {
    auto from = random() % (row.size() + 1), end = random() % (row.size() + 1);
    const auto amount = static_cast<std::int64_t>(random() % 30) - 10;
    occupancy.add(from, end, amount);
    for (auto p = from; p < end; ++p) row[p] += amount;
    ASSERT_EQ(occupancy.most(), *std::max_element(row.begin(), row.end()));
    const auto limit = static_cast<std::int64_t>(random() % 300);
    from = random() % (row.size() + 1), end = random() % (row.size() + 1);
    auto expected = end;
    while (expected > from && row[expected - 1] <= limit) --expected;
    ASSERT_EQ(occupancy.room_before(end, from, limit), expected) << from << ' ' << end << ' ' << limit;
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomOccupancy, testing::Range(0U, 50U));

}  // namespace
}  // namespace unshard::zero
