// Presence of parameters on a host: claims, users, room; a rank that dies with a claim.
#include "zero/host_copy.h"

#include <gtest/gtest.h>

#include <barrier>
#include <random>
#include <thread>

#include "comm/testing.h"
#include "unshard/core/error.h"

namespace unshard::zero {
namespace {

HostGroupOptions options() {
  HostGroupOptions options;
  options.timeout = std::chrono::seconds(20);
  return options;
}

/// Ranks of one host as threads.
void on_host(int size, const std::function<void(int, HostCopy&)>& fn) {
  auto groups = HostGroup::in_process(size, options());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      HostCopy copy(*groups[static_cast<std::size_t>(rank)]);
      fn(rank, copy);
      groups[static_cast<std::size_t>(rank)]->barrier("end of the test");
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(HostCopy, GoesThroughItsStates) {
  on_host(1, [](int, HostCopy& copy) {
    copy.add(0, "w", [] {});
    EXPECT_EQ(copy.presence(0, 0), Presence::absent);
    EXPECT_FALSE(copy.hold(0, 0));
    Presence before{};
    ASSERT_TRUE(copy.claim(0, 0, &before));
    EXPECT_EQ(before, Presence::absent);
    EXPECT_FALSE(copy.claim(0, 0, &before));
    copy.arrived(0, /*held=*/true);
    EXPECT_EQ(copy.users(0), 1U);
    EXPECT_TRUE(copy.hold(0, 0));
    EXPECT_FALSE(copy.claim_unused(0)) << "somebody uses it";
    copy.drop(0);
    EXPECT_FALSE(copy.claim(0, 0, &before));
    EXPECT_EQ(copy.presence(0, 1), Presence::stale) << "for who has seen the value change";
    EXPECT_FALSE(copy.hold(0, 1));
    ASSERT_TRUE(copy.claim(0, 1, &before));
    EXPECT_EQ(before, Presence::stale);
    EXPECT_EQ(copy.users(0), 1U) << "claimed under a user";
    copy.arrived(0, /*held=*/false);
    EXPECT_EQ(copy.presence(0, 1), Presence::present);
    EXPECT_EQ(copy.presence(0, 0), Presence::present) << "newer than what this one must have";
    copy.drop(0);
    ASSERT_TRUE(copy.claim_unused(0));
    copy.give_back(0, Presence::absent);
    EXPECT_EQ(copy.presence(0, 1), Presence::absent);
  });
}

TEST(HostCopy, WhatWasClaimedBeforeAChangeIsNotPresentAfterIt) {
  on_host(1, [](int, HostCopy& copy) {
    copy.add(0, "w", [] {});
    Presence before{};
    for (const std::uint32_t epoch : {0U, 7U, 0x7fffffffU, 0x80000000U, 0xffffffffU}) {  // the count goes round
      ASSERT_TRUE(copy.claim(0, epoch, &before)) << epoch;
      copy.arrived(0, /*held=*/false);
      EXPECT_TRUE(copy.hold(0, epoch)) << epoch;
      copy.drop(0);
      EXPECT_FALSE(copy.hold(0, epoch + 1)) << epoch;
    }
    EXPECT_FALSE(copy.hold(0, 0));
  });
}

TEST(HostCopy, MemoryIsSetUpByOneRankAndAFailureIsTriedAgain) {
  std::atomic<int> set_up{0}, failures{0};
  on_host(4, [&](int, HostCopy& copy) {
    for (int id = 0; id < 500; ++id) {  // the segment grows meanwhile
      try {
        copy.add(id, "w", [&] {
          if (id == 7 && failures++ == 0) throw std::runtime_error("no memory");
          std::this_thread::yield();
          ++set_up;
        });
      } catch (const std::runtime_error&) {
        copy.add(id, "w", [&] { ++set_up; });
      }
      EXPECT_EQ(copy.presence(id, 0), Presence::absent);
    }
  });
  EXPECT_EQ(set_up, 500);
}

TEST(HostCopy, RoomIsNeverGivenTwice) {
  on_host(4, [](int rank, HostCopy& copy) {
    std::mt19937 random(static_cast<unsigned>(rank));
    for (int i = 0; i < 2000; ++i) {
      const auto numel = static_cast<std::int64_t>(random() % 60);
      if (!copy.take_room(numel, numel * 4, 100)) continue;
      ASSERT_LE(copy.live_numel(), 100);
      copy.leave_room(numel, numel * 4);
    }
    EXPECT_LE(copy.peak_numel(), 100);
    EXPECT_LE(copy.peak_bytes(), 400);
  });
}

// Any number of ranks that claim, use, see changes and let go at random: one at a time fills, none reads what isn't there or is older than
// the changes it has seen.
TEST(HostCopy, RandomUsersNeverSeeAParameterThatIsNotThere) {
  constexpr int kIds = 3;
  std::array<std::atomic<int>, kIds> values{}, fillers{}, changes{};
  on_host(4, [&](int rank, HostCopy& copy) {
    for (int id = 0; id < kIds; ++id) copy.add(id, "w", [] {});
    std::mt19937 random(static_cast<unsigned>(rank) + 7);
    for (int i = 0; i < 5000; ++i) {
      const int id = static_cast<int>(random() % kIds);
      const auto at = static_cast<std::size_t>(id);
      if (random() % 16 == 0) ++changes[at];
      const int known = changes[at].load();
      Presence before{};
      if (copy.hold(id, static_cast<std::uint32_t>(known))) {
        ASSERT_GE(values[at].load(), known + 1);
        copy.drop(id);
      } else if (copy.claim(id, static_cast<std::uint32_t>(known), &before)) {
        ASSERT_EQ(fillers[at].fetch_add(1), 0);
        values[at] = known + 1;
        fillers[at].fetch_sub(1);
        copy.arrived(id, /*held=*/false);
        copy.notify();
      } else {
        copy.wait_while_busy(id, "w", copy.failures(id));
      }
      if (random() % 8 == 0 && copy.claim_unused(id)) {
        ASSERT_EQ(fillers[at].fetch_add(1), 0);
        values[at] = 0;
        fillers[at].fetch_sub(1);
        copy.give_back(id, Presence::absent);
      }
    }
  });
}

TEST(HostCopy, ARankThatDiesWithAClaimIsNoticedByThoseWhoWait) {
  testing::PipeExchange exchange(2);
  const auto exits = testing::fork_ranks(2, 30, [&](int rank) {
    auto group = HostGroup::connect(rank, 2, exchange.for_rank(rank), options());
    HostCopy copy(*group);
    copy.add(0, "blocks.3.w", [] {});
    group->barrier("added");
    Presence before{};
    if (rank == 1) {
      if (!copy.claim(0, 0, &before)) return 2;
      group->barrier("claimed");
      ::kill(::getpid(), SIGKILL);
    }
    group->barrier("claimed");
    try {
      copy.wait_while_busy(0, "blocks.3.w", copy.failures(0));
    } catch (const CommError& error) {
      const std::string text = error.what();
      return text.find("rank 1") != std::string::npos && text.find("blocks.3.w") != std::string::npos ? 0 : 3;
    }
    return 4;
  });
  EXPECT_EQ(exits[0].code, 0);
  EXPECT_LT(exits[0].seconds, 5);
  EXPECT_EQ(exits[1].signal, SIGKILL);
}

/// Ranks as threads whose waits give up after `timeout_s`.
void on_impatient_host(double timeout_s, const std::function<void(int, HostGroup&, HostCopy&)>& fn) {
  auto impatient = options();
  impatient.timeout = std::chrono::duration<double>(timeout_s);
  auto groups = HostGroup::in_process(2, impatient);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      HostCopy copy(*groups[static_cast<std::size_t>(rank)]);
      copy.add(0, "w", [] {});
      groups[static_cast<std::size_t>(rank)]->barrier("added");
      fn(rank, *groups[static_cast<std::size_t>(rank)], copy);
    });
  }
  for (auto& thread : threads) thread.join();
}

void nap(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

std::string error_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const CommError& error) {
    return error.what();
  }
  return "no error";
}

TEST(HostCopy, AFetchThatFailsIsTheErrorOfThoseWhoWaitForIt) {
  std::barrier<> meeting(3);
  on_host(3, [&](int rank, HostCopy& copy) {
    copy.add(0, "w", [] {});
    meeting.arrive_and_wait();
    Presence before{};
    const auto failures = copy.failures(), failures_of_w = copy.failures(0);
    if (rank == 1) {
      EXPECT_TRUE(copy.claim(0, 0, &before));
    }
    meeting.arrive_and_wait();
    if (rank == 0) {
      const auto error = error_of([&] { copy.wait_while_busy(0, "w", failures_of_w); });
      EXPECT_NE(error.find("'w'] rank 7 gives no sign of life"), std::string::npos) << error;
    } else if (rank == 1) {
      nap(0.2);
      copy.fail({0}, "rank 7 gives no sign of life");
    } else {
      const auto error = error_of([&] { copy.wait_until([] { return false; }, "room", failures); });
      EXPECT_NE(error.find("room: rank 7 gives no sign of life"), std::string::npos) << error;
    }
    meeting.arrive_and_wait();
    copy.wait_while_busy(0, "w", copy.failures(0));  // who comes later isn't concerned
    if (rank == 2) {
      EXPECT_TRUE(copy.claim(0, 0, &before));
      EXPECT_EQ(before, Presence::stale);
      copy.arrived(0, false);
    }
  });
}

TEST(HostCopy, WhoWaitsForAFetchThatGetsOnWaitsLongerThanTheTimeOut) {
  on_impatient_host(0.5, [](int rank, HostGroup& group, HostCopy& copy) {
    Presence before{};
    if (rank == 0) {
      ASSERT_TRUE(copy.claim(0, 0, &before));
    }
    group.barrier("claimed");
    if (rank == 1) return copy.wait_while_busy(0, "w", 0);  // throws when it doesn't come
    for (int i = 0; i < 25; ++i) {
      nap(0.1);
      copy.moved().fetch_add(1);
    }
    copy.arrived(0, false);
    group.notify();
  });
}

// Both have the same time-out, and the waiting one's began a little later or earlier: what counts is what the fetch's own says.
TEST(HostCopy, TheTimeOutOfAFetchComesBeforeThatOfThoseWhoWaitForIt) {
  on_impatient_host(0.5, [](int rank, HostGroup& group, HostCopy& copy) {
    Presence before{};
    if (rank == 0) {
      ASSERT_TRUE(copy.claim(0, 0, &before));
    }
    group.barrier("claimed");
    if (rank == 0) {
      nap(0.9);
      return copy.fail({0}, "rank 7 has sent nothing for 0.5 s");
    }
    try {
      copy.wait_while_busy(0, "w", 0);
      ADD_FAILURE() << "it should have failed";
    } catch (const CommError& error) {
      EXPECT_NE(std::string(error.what()).find("rank 7 has sent nothing"), std::string::npos) << error.what();
    }
  });
}

}  // namespace
}  // namespace unshard::zero
