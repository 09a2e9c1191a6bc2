// HostGroup among processes: connection, and peers that die or stall.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <functional>
#include <thread>

#include "comm/testing.h"
#include "unshard/comm/host_group.h"
#include "unshard/core/error.h"

namespace unshard {
namespace {

using testing::fork_ranks;
using testing::PipeExchange;
using testing::RankExit;
using namespace std::chrono_literals;

/// Children report by exit code; what they saw is printed for people.
bool contains_all(const std::string& text, const std::vector<std::string>& parts) {
  bool all = true;
  for (const auto& part : parts) {
    if (text.find(part) != std::string::npos) continue;
    std::cerr << "missing '" << part << "' in: " << text << std::endl;
    all = false;
  }
  return all;
}

std::string error_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const CommError& error) {
    return error.what();
  }
  return {};
}

double seconds_of(const std::function<void()>& fn) {
  const auto started = std::chrono::steady_clock::now();
  fn();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

void expect_success(const std::vector<RankExit>& exits) {
  for (std::size_t rank = 0; rank < exits.size(); ++rank)
    EXPECT_EQ(exits[rank].code, 0) << "rank " << rank << ", signal " << exits[rank].signal;
}

TEST(HostGroupProcesses, ConnectMapsTheSameMemory) {
  const PipeExchange exchange(3);
  expect_success(fork_ranks(3, 30, [&](int rank) {
    const auto group = HostGroup::connect(rank, 3, exchange.for_rank(rank));
    for (int round = 0; round < 5; ++round) {
      const auto segment = group->create_segment("numbers", 64, 16 << 20);
      if (rank == 2) segment->reserve(9 << 20);  // any rank grows it for all
      std::memcpy(segment->data() + rank * 4, &rank, 4);
      group->barrier("written");
      for (int r = 0; r < 3; ++r) {
        int got = -1;
        std::memcpy(&got, segment->data() + r * 4, 4);
        if (got != r) return 1;
      }
      if (segment->size() < (9u << 20)) return 2;
      segment->data()[(9 << 20) - 1 - rank] = std::byte{1};
      group->barrier("read");
    }
    return 0;
  }));
}

/// Rank 1 of three kills itself; the others wait in `wait` and must name it within a second.
void expect_death_noticed(const std::function<void(HostGroup&)>& wait) {
  const PipeExchange exchange(3);
  const auto exits = fork_ranks(3, 30, [&](int rank) {
    const auto group = HostGroup::connect(rank, 3, exchange.for_rank(rank));
    group->set_phase(Phase::backward, 3, "blocks.1.up.weight");
    group->barrier("all in backward");
    if (rank == 1) {
      std::this_thread::sleep_for(50ms);
      ::raise(SIGKILL);
    }
    std::string error;
    const double seconds = seconds_of([&] { error = error_of([&] { wait(*group); }); });
    if (!contains_all(error, {"rank 1 (pid ", "is gone", "last seen in backward of step 3 at 'blocks.1.up.weight'",
                              "this is rank " + std::to_string(rank)}))
      return 1;
    return seconds < 1.05 ? 0 : 2;
  });
  EXPECT_EQ(exits[0].code, 0);
  EXPECT_EQ(exits[1].signal, SIGKILL);
  EXPECT_EQ(exits[2].code, 0);
}

TEST(HostGroupProcesses, ADeadPeerEndsABarrier) {
  expect_death_noticed([](HostGroup& group) { group.barrier("step: publish"); });
}

TEST(HostGroupProcesses, ADeadPeerEndsAWait) {
  expect_death_noticed([](HostGroup& group) { group.wait_until([] { return false; }, "bucket 3"); });
}

TEST(HostGroupProcesses, ADeadPeerEndsASmallGather) {
  expect_death_noticed([](HostGroup& group) {
    char all[3];
    group.all_gather_small("x", 1, all, "flags");
  });
}

TEST(HostGroupProcesses, ADeadPeerEndsTheCreationOfASegment) {
  expect_death_noticed([](HostGroup& group) { group.create_segment("late", 4096, 4096); });
}

TEST(HostGroupProcesses, APeerThatExitsWithoutLeavingIsGone) {
  const PipeExchange exchange(2);
  const auto exits = fork_ranks(2, 30, [&](int rank) {
    const auto group = HostGroup::connect(rank, 2, exchange.for_rank(rank));
    if (rank == 1) ::_exit(7);
    return contains_all(error_of([&] { group->barrier("step"); }), {"rank 1 (pid ", "is gone"}) ? 0 : 1;
  });
  EXPECT_EQ(exits[0].code, 0);
}

TEST(HostGroupProcesses, AStalledPeerIsNamedByTheTimeOut) {
  const PipeExchange exchange(2);
  expect_success(fork_ranks(2, 30, [&](int rank) {
    HostGroupOptions options;
    options.timeout = std::chrono::duration<double>(0.5);
    const auto group = HostGroup::connect(rank, 2, exchange.for_rank(rank), options);
    group->set_phase(rank == 0 ? Phase::updating : Phase::forward, 9, rank == 0 ? "" : "h.3.attn");
    group->barrier("here");
    if (rank == 1) {
      std::this_thread::sleep_for(1s);
      return 0;
    }
    return contains_all(error_of([&] { group->barrier("step: publish"); }),
                        {"0.5 s", "rank 1: forward, step 9, at 'h.3.attn'", "rank 0: updating, step 9", "waiting in"})
               ? 0
               : 1;
  }));
}

TEST(HostGroupProcesses, AForkedChildMayNotUseItsParentsGroup) {
  const auto group = HostGroup::in_process(1)[0];
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const bool refused = contains_all(error_of([&] { group->barrier("step"); }), {"fork"}) &&
                         contains_all(error_of([&] { group->set_phase(Phase::forward, 1, "x"); }), {"fork"});
    ::_exit(refused ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(group->phase_of(0), Phase::starting);
}

TEST(HostGroupProcesses, ARankThatDiesBeforeConnectingIsAnError) {
  const PipeExchange exchange(2);
  const auto exits = fork_ranks(2, 30, [&](int rank) {
    if (rank == 1) {
      exchange.for_rank(1)(std::to_string(::getpid()) + " -");
      ::raise(SIGKILL);
    }
    return contains_all(error_of([&] { HostGroup::connect(rank, 2, exchange.for_rank(rank)); }), {"rank 1"}) ? 0 : 1;
  });
  EXPECT_EQ(exits[0].code, 0);
}

}  // namespace
}  // namespace unshard
