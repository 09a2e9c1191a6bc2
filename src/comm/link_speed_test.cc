#include "comm/link_speed.h"

#include <gtest/gtest.h>

#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "comm/testing.h"

namespace unshard {
namespace {

std::set<std::pair<double, double>> measured(const std::vector<int>& hosts, const CommOptions& options) {
  std::set<std::pair<double, double>> said;
  std::mutex mutex;
  testing::run_hosts(hosts, options, [&](int, Communicator& comm) {
    for (int again = 0; again < 2; ++again) {  // the messages of the first time are all taken
      const auto speed = measure_links(comm);
      if (again == 0) continue;
      std::lock_guard lock(mutex);
      said.insert({speed.round_trip_s, speed.bytes_per_s});
    }
  });
  return said;
}

TEST(LinkSpeed, IsNothingOnOneHost) { EXPECT_EQ(measured({3}, {}), (std::set<std::pair<double, double>>{{0, 0}})); }

TEST(LinkSpeed, IsTheSameOnAllRanksOfSeveralHosts) {
  const auto said = measured({2, 1, 2}, {});
  ASSERT_EQ(said.size(), 1u);
  EXPECT_GT(said.begin()->first, 0);
  EXPECT_GT(said.begin()->second, 1e6);  // loopback
}

}  // namespace
}  // namespace unshard
