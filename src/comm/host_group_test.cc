// HostGroup among threads: barriers, small gathers, segments, waits and their errors.
#include "unshard/comm/host_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>
#include <stdexcept>
#include <thread>

#include "comm/host_group_internal.h"
#include "comm/testing.h"
#include "unshard/core/error.h"

namespace unshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

void run_group(const std::vector<std::shared_ptr<HostGroup>>& group, const std::function<void(int, HostGroup&)>& fn) {
  std::vector<std::thread> threads;
  for (const auto& handle : group) threads.emplace_back([&fn, handle] { fn(handle->rank(), *handle); });
  for (auto& thread : threads) thread.join();
}

HostGroupOptions with_timeout(double seconds) {
  HostGroupOptions options;
  options.timeout = std::chrono::duration<double>(seconds);
  return options;
}

/// The text of the CommError that `fn` throws; empty if it throws none.
std::string error_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const CommError& error) {
    return error.what();
  }
  return {};
}

TEST(HostGroup, NobodyPassesABarrierBeforeAllEntered) {
  constexpr int kRanks = 4, kRounds = 300;
  std::atomic<int> entered{0};
  run_group(HostGroup::in_process(kRanks), [&](int rank, HostGroup& group) {
    for (int round = 1; round <= kRounds; ++round) {
      entered.fetch_add(1);
      group.barrier("round");
      EXPECT_GE(entered.load(), round * kRanks);
      group.barrier("checked");
    }
  });
}

TEST(HostGroup, SmallGathersBringEveryRanksBytesInOrder) {
  constexpr int kRanks = 3;
  run_group(HostGroup::in_process(kRanks), [&](int rank, HostGroup& group) {
    std::mt19937 sizes(7);  // alike on all ranks
    for (int round = 0; round < 300; ++round) {
      const std::size_t bytes = sizes() % (HostGroup::kSmallBytes + 1);
      const std::vector<char> mine(bytes, static_cast<char>(rank * 50 + round % 50));
      std::vector<char> all(bytes * kRanks);
      group.all_gather_small(mine.data(), bytes, all.data(), "bytes");
      for (std::size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], static_cast<char>(static_cast<int>(i / bytes) * 50 + round % 50));
    }
  });
}

TEST(HostGroup, SmallGathersOfDifferentLengthsAreAnError) {
  run_group(HostGroup::in_process(2), [&](int rank, HostGroup& group) {
    char mine[8] = {}, all[16];
    const auto error = error_of([&] { group.all_gather_small(mine, rank == 0 ? 4 : 8, all, "flags"); });
    EXPECT_THAT(error, AllOf(HasSubstr("flags"), HasSubstr("4"), HasSubstr("8")));
  });
}

TEST(HostGroup, SegmentsAreOneMemoryThatGrowsInPlace) {
  run_group(HostGroup::in_process(3), [&](int rank, HostGroup& group) {
    const auto segment = group.create_segment("params", 4096, 64 << 20);
    std::byte* const base = segment->data();
    base[rank] = static_cast<std::byte>(rank + 1);
    group.barrier("written");
    for (int r = 0; r < 3; ++r) EXPECT_EQ(base[r], static_cast<std::byte>(r + 1));
    segment->reserve(8 << 20);  // all ranks at once
    segment->reserve(1 << 20);  // less than there is: nothing happens
    EXPECT_EQ(segment->data(), base);
    EXPECT_GE(segment->size(), std::size_t{8} << 20);
    EXPECT_EQ(base[(8 << 20) - 1], std::byte{0});
    EXPECT_EQ(base[0], std::byte{1});
    EXPECT_THAT(error_of([&] { segment->reserve(65 << 20); }), AllOf(HasSubstr("params"), HasSubstr("limit")));
    group.barrier("done");
  });
}

TEST(HostGroup, SegmentsOfDifferentNamesOrSizesAreAnError) {
  run_group(HostGroup::in_process(2), [&](int rank, HostGroup& group) {
    EXPECT_THAT(error_of([&] { group.create_segment("states", rank == 0 ? 100 : 200, 1000); }),
                AllOf(HasSubstr("states"), HasSubstr("100"), HasSubstr("200")));
  });
}

TEST(HostGroup, ManySegmentsComeInOrder) {
  run_group(HostGroup::in_process(3), [&](int rank, HostGroup& group) {
    for (int i = 0; i < 20; ++i) {
      const auto segment = group.create_segment("number " + std::to_string(i), 64, 64);
      if (rank == i % 3) std::memcpy(segment->data(), &i, sizeof(i));
      group.barrier("written");
      int got = -1;
      std::memcpy(&got, segment->data(), sizeof(got));
      EXPECT_EQ(got, i);
      group.barrier("read");
    }
  });
}

TEST(HostGroup, NotifyWakesAWaiterThatSleeps) {
  std::atomic<int> turn{0};
  run_group(HostGroup::in_process(2), [&](int rank, HostGroup& group) {
    for (int round = 0; round < 200; ++round) {
      group.wait_until([&] { return turn.load() == 2 * round + rank; }, "turn");
      if (round % 20 == 0) std::this_thread::sleep_for(1ms);  // long enough for the other to sleep
      turn.fetch_add(1);
      group.notify();
    }
  });
  EXPECT_EQ(turn.load(), 400);
}

TEST(HostGroup, ATimeOutSaysWhoWaitsWhere) {
  run_group(HostGroup::in_process(2, with_timeout(0.3)), [&](int rank, HostGroup& group) {
    group.set_phase(Phase::backward, 3, rank == 0 ? "blocks.0.up.weight" : "blocks.1.up.weight");
    group.barrier("both are in backward");
    if (rank == 1) return std::this_thread::sleep_for(600ms);
    const auto error = error_of([&] { group.barrier("step: publish"); });
    EXPECT_THAT(error, AllOf(HasSubstr("[comm.barrier 'step: publish']"), HasSubstr("0.3 s"), HasSubstr("rank 0: backward, step 3"),
                             HasSubstr("waiting in [comm.barrier 'step: publish']"), HasSubstr("rank 1: backward, step 3"),
                             HasSubstr("'blocks.1.up.weight'")));
  });
}

TEST(HostGroup, FailEndsPeersWaitsAtOnceWithTheReason) {
  run_group(HostGroup::in_process(3), [&](int rank, HostGroup& group) {
    group.set_phase(Phase::forward, 7, "wte");
    group.barrier("all here");
    if (rank == 1) {
      std::this_thread::sleep_for(20ms);
      group.fail("loss is NaN");
      return;
    }
    const auto started = std::chrono::steady_clock::now();
    const auto error = error_of([&] { rank == 0 ? group.barrier("step") : group.wait_until([] { return false; }, "shards"); });
    EXPECT_LT(std::chrono::steady_clock::now() - started, 1s);
    EXPECT_THAT(error, AllOf(HasSubstr("rank 1"), HasSubstr("loss is NaN"), HasSubstr("forward of step 7 at 'wte'")));
  });
}

TEST(HostGroup, APeerThatLeftIsNamedByThoseItOwes) {
  auto group = HostGroup::in_process(2);
  group[1]->set_phase(Phase::idle, 4, "");
  group[1].reset();
  const auto error = error_of([&] { group[0]->barrier("step: publish"); });
  EXPECT_THAT(error,
              AllOf(HasSubstr("rank 1"), HasSubstr("left the group"), HasSubstr("had it fewer batches"), HasSubstr("idle of step 4")));
  EXPECT_EQ(group[0]->phase_of(1), Phase::gone);
}

TEST(HostGroup, APeerThatLeftAfterItsPartIsNoError) {
  auto group = HostGroup::in_process(2);
  std::thread peer([&] {
    group[1]->barrier("last");
    group[1].reset();
  });
  std::this_thread::sleep_for(30ms);
  group[0]->barrier("last");
  peer.join();
}

TEST(HostGroup, TheInterruptCheckCanLeaveAWait) {
  struct Interrupted {};
  HostGroupOptions options;
  std::atomic<int> calls{0};
  options.interrupt_check = [&] {
    if (++calls == 2) throw Interrupted{};
  };
  const auto group = HostGroup::in_process(2, options);
  EXPECT_THROW(group[0]->barrier("never"), Interrupted);
}

// The others are in the middle of something that it leaves: they hear why, at once, and it can't go on as if nothing had been.
TEST(HostGroup, AnInterruptedWaitEndsTheOthersWithItsText) {
  HostGroupOptions options = with_timeout(20);
  const auto main = std::this_thread::get_id();
  options.interrupt_check = [main] {
    if (std::this_thread::get_id() == main) throw std::runtime_error("KeyboardInterrupt");
  };
  const auto group = HostGroup::in_process(3, options);
  std::string heard;
  std::thread peer([&] { heard = error_of([&] { group[1]->barrier("step"); }); });
  EXPECT_THROW(group[0]->wait_until([] { return false; }, "gradients"), std::runtime_error);
  peer.join();
  EXPECT_THAT(heard, AllOf(HasSubstr("rank 0 (pid "), HasSubstr("failed: KeyboardInterrupt in [comm.wait 'gradients']")));
  EXPECT_THAT(error_of([&] { group[0]->barrier("again"); }), AllOf(HasSubstr("can't be used any more"), HasSubstr("KeyboardInterrupt")));
  // Rank 1 hands on what it heard, and rank 2 is told once, by whomever.
  const auto error = error_of([&] { group[2]->barrier("step"); });
  EXPECT_THAT(error, AllOf(HasSubstr("rank 0 "), HasSubstr("failed: KeyboardInterrupt in [comm.wait 'gradients']")));
  EXPECT_EQ(error.find("failed: "), error.rfind("failed: ")) << error;
}

TEST(HostGroup, ARankThatLeavesWithAReasonIsQuoted) {
  auto group = comm::threads_group(2, with_timeout(20));
  group[1]->set_departure("ValueError: x");
  group[1].reset();
  EXPECT_THAT(error_of([&] { group[0]->barrier("step"); }), HasSubstr("left the group after ValueError: x"));
  EXPECT_THAT(group[0]->describe_ranks(), HasSubstr("rank 1: left the group after ValueError: x"));
}

TEST(HostGroup, ASubsetShowsWhatItsRanksDoInTheWholeGroup) {
  const auto group = comm::threads_group(3, with_timeout(20));
  std::vector<std::shared_ptr<comm::HostGroupImpl>> pair(3);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < 3; ++rank) threads.emplace_back([&, rank] { pair[rank] = group[rank]->subset({1, 2}); });
  for (auto& thread : threads) thread.join();
  group[2]->set_phase(Phase::backward, 7, "blocks.1.w");
  EXPECT_THAT(pair[1]->describe_ranks(), HasSubstr("rank 1: backward, step 7, at 'blocks.1.w'"));
  group[2]->fail("no memory");
  EXPECT_THAT(error_of([&] { pair[1]->barrier("step"); }), HasSubstr("failed: no memory, last seen in backward of step 7"));
}

TEST(HostGroup, LongDetailsAreCutAndPhasesAreReadable) {
  const auto group = HostGroup::in_process(2);
  group[1]->set_phase(Phase::reducing, 11, std::string(300, 'x'));
  EXPECT_EQ(group[0]->phase_of(1), Phase::reducing);
  EXPECT_THAT(group[0]->describe_ranks(),
              AllOf(HasSubstr("rank 1: reducing, step 11, at '" + std::string(100, 'x') + "'"), HasSubstr("rank 0")));
}

TEST(HostGroup, PhasesAreReadWhileTheyAreWritten) {
  const auto group = HostGroup::in_process(2);
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (int i = 0; !stop.load(); ++i) group[1]->set_phase(i % 2 ? Phase::forward : Phase::backward, i, i % 2 ? "aaaaaaaaaaaa" : "bbbb");
  });
  for (int i = 0; i < 2000; ++i) {
    const std::string text = group[0]->describe_ranks();
    ASSERT_THAT(text, HasSubstr("rank 1: "));
  }
  stop = true;
  writer.join();
}

int open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<int>(std::distance(begin(all), end(all)));
}

int shared_mappings() {
  std::ifstream maps("/proc/self/maps");
  int found = 0;
  for (std::string line; std::getline(maps, line);) found += line.find("memfd:unshard") != std::string::npos;
  return found;
}

TEST(HostGroup, NothingIsLeftWhenTheHandlesAreGone) {
  const int descriptors = open_descriptors(), mappings = shared_mappings();
  {
    const auto group = HostGroup::in_process(2);
    std::shared_ptr<SharedSegment> segments[2];
    run_group(group, [&](int rank, HostGroup& handle) { segments[rank] = handle.create_segment("kept", 4096, 1 << 20); });
    EXPECT_GT(shared_mappings(), mappings);
  }
  EXPECT_EQ(open_descriptors(), descriptors);
  EXPECT_EQ(shared_mappings(), mappings);
}

}  // namespace
}  // namespace unshard
