// Ranks here are threads of one process, with one clock: what is measured must be nothing, to within what the measurement claims.
#include "comm/clock_offset.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <string>
#include <vector>

#include "comm/testing.h"

namespace unshard {
namespace {

std::vector<ClockReading> measure(const std::vector<int>& hosts, const CommOptions& options) {
  std::vector<ClockReading> readings(16);
  const auto before = Timeline::now_ns();
  testing::run_hosts(hosts, options, [&](int rank, Communicator& comm) {
    readings[static_cast<std::size_t>(rank)] = read_clock_offset(comm);
    readings[static_cast<std::size_t>(rank)] = read_clock_offset(comm);  // again: the messages of the first time are all taken
  });
  const auto after = Timeline::now_ns();
  int ranks = 0;
  for (const int count : hosts) ranks += count;
  readings.resize(static_cast<std::size_t>(ranks));
  for (const auto& reading : readings) {
    EXPECT_GE(reading.at_ns, before);
    EXPECT_LE(reading.at_ns, after);
    EXPECT_LE(std::abs(reading.offset_ns), reading.uncertainty_ns + 1);
  }
  return readings;
}

TEST(ClockOffset, OneHostHasOneClock) {
  for (const auto& reading : measure({3}, {})) {
    EXPECT_EQ(reading.offset_ns, 0);
    EXPECT_EQ(reading.uncertainty_ns, 0);
  }
}

TEST(ClockOffset, IsMeasuredBetweenHosts) {
  const auto readings = measure({2, 1, 2}, {});
  for (const int rank : {0, 1}) EXPECT_EQ(readings[rank].uncertainty_ns, 0) << rank;  // rank 0's host
  for (const int rank : {2, 3, 4}) EXPECT_GT(readings[rank].uncertainty_ns, 0) << rank;
  EXPECT_EQ(readings[3].offset_ns, readings[4].offset_ns);  // one host, one clock
  EXPECT_EQ(readings[3].uncertainty_ns, readings[4].uncertainty_ns);
}

TEST(ClockOffset, WithoutSharedMemoryEveryRankIsAHost) {
  const auto readings = measure({3}, testing::unshared());
  EXPECT_EQ(readings[0].uncertainty_ns, 0);
  EXPECT_GT(readings[1].uncertainty_ns, 0);
  EXPECT_GT(readings[2].uncertainty_ns, 0);
}

TEST(ClockOffset, LaterReadingsAreShorter) {
  const auto folder = std::filesystem::path(::testing::TempDir()) / ("unshard_clock_" + std::to_string(::getpid()));
  testing::run_hosts({1, 1}, {}, [&](int rank, Communicator& comm) {
    TimelineOptions options;
    options.directory = folder.string();
    options.rank = rank;
    comm.timeline().open(options);
    (void)read_clock_offset(comm);
    (void)read_clock_offset(comm, kLaterClockRounds);
    comm.timeline().close();
  });
  for (const auto* name : {"timeline.rank0.json", "timeline.rank1.json"}) {
    std::ifstream file(folder / name);
    int sent = 0;
    for (std::string line; std::getline(file, line);) sent += line.find(R"("name":"send")") != std::string::npos;
    EXPECT_EQ(sent, 12 + 3) << name;
  }
  std::filesystem::remove_all(folder);
}

TEST(ClockOffset, AWorldOfOne) { EXPECT_EQ(read_clock_offset(*single_process_communicator()).offset_ns, 0); }

}  // namespace
}  // namespace unshard
