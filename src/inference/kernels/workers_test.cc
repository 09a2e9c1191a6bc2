// Facts about the workers: every one runs once a call, every index comes once, exceptions come out, sleep and wake lose nothing.
#include "inference/kernels/workers.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

namespace unshard::inference {
namespace {

TEST(Workers, RunsEachWorkerOnceACall) {
  Workers workers(4);
  ASSERT_EQ(workers.count(), 4);
  std::vector<std::atomic<int>> calls(4);
  for (int round = 0; round < 200; ++round) workers.run([&](std::int64_t worker) { ++calls[worker]; });
  for (const auto& count : calls) EXPECT_EQ(count, 200);
}

TEST(Workers, RunReturnsAfterEveryWorkerHasWritten) {
  Workers workers(3);
  for (int round = 1; round <= 200; ++round) {
    int written[3] = {};  // plain memory: a race would show in the thread sanitizer, a lost write here
    workers.run([&](std::int64_t worker) { written[worker] = round; });
    for (const int value : written) ASSERT_EQ(value, round);
  }
}

TEST(Workers, ParallelForCoversEachIndexOnceInPiecesOfTheGrain) {
  Workers workers(3);
  for (const std::int64_t n : {0, 1, 7, 64, 1000}) {
    for (const std::int64_t grain : {1, 8, 1000}) {
      std::vector<std::atomic<int>> seen(static_cast<std::size_t>(n));
      workers.parallel_for(n, grain, [&](std::int64_t begin, std::int64_t end) {
        EXPECT_EQ(begin % grain, 0);
        EXPECT_LE(end - begin, grain);
        for (std::int64_t i = begin; i < end; ++i) ++seen[i];
      });
      for (const auto& count : seen) EXPECT_EQ(count, 1);
    }
  }
}

TEST(Workers, OneWorkerIsTheCaller) {
  Workers workers(1);
  std::thread::id id;
  workers.run([&](std::int64_t) { id = std::this_thread::get_id(); });
  EXPECT_EQ(id, std::this_thread::get_id());
}

TEST(Workers, AnExceptionOfAnyWorkerComesOutAndTheNextCallRuns) {
  Workers workers(3);
  for (std::int64_t thrower = 0; thrower < 3; ++thrower) {
    std::atomic<int> ran{0};
    EXPECT_THROW(workers.run([&](std::int64_t worker) {
      ++ran;
      if (worker == thrower) throw std::runtime_error("x");
    }),
                 std::runtime_error);
    EXPECT_EQ(ran, 3);
  }
  std::atomic<int> ran{0};
  workers.run([&](std::int64_t) { ++ran; });
  EXPECT_EQ(ran, 3);
}

TEST(Workers, WakeAfterTheyFellAsleep) {
  Workers workers(3);
  std::atomic<int> ran{0};
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // ten times what they spin
    workers.run([&](std::int64_t) { ++ran; });
  }
  EXPECT_EQ(ran, 15);
}

TEST(Workers, LateWorkersHarmNoLaterCall) {
  // More workers than cores: some wake up when their call is over, among calls of both kinds whose functions and memory are gone by then.
  Workers workers(8);
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    const auto n = static_cast<std::int64_t>(random() % 40), grain = static_cast<std::int64_t>(1 + random() % 3);
    auto seen = std::make_unique<std::vector<std::atomic<int>>>(static_cast<std::size_t>(n));
    workers.parallel_for(n, grain, [&, pieces = seen.get()](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) ++(*pieces)[static_cast<std::size_t>(i)];
    });
    for (const auto& count : *seen) ASSERT_EQ(count, 1);
    if (round % 3 != 0) continue;
    auto calls = std::make_unique<std::vector<std::atomic<int>>>(8);
    workers.run([&, each = calls.get()](std::int64_t worker) { ++(*each)[static_cast<std::size_t>(worker)]; });
    for (const auto& count : *calls) ASSERT_EQ(count, 1);
  }
}

TEST(Workers, APieceThatThrowsLeavesTheOthersDone) {
  Workers workers(3);
  std::atomic<int> done{0};
  EXPECT_THROW(workers.parallel_for(50, 1,
                                    [&](std::int64_t begin, std::int64_t) {
                                      ++done;
                                      if (begin % 7 == 3) throw std::runtime_error("x");
                                    }),
               std::runtime_error);
  EXPECT_EQ(done, 50);
}

TEST(Workers, CallerSleepsForASlowWorker) {
  Workers workers(2);
  bool done = false;
  workers.run([&](std::int64_t worker) {
    if (worker == 0) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    done = true;
  });
  EXPECT_TRUE(done);
}

TEST(Workers, RefusesACallInsideACall) {
  Workers workers(2);
  EXPECT_THROW(workers.run([&](std::int64_t) { workers.run([](std::int64_t) {}); }), std::logic_error);
  EXPECT_THROW(workers.parallel_for(9, 1, [&](std::int64_t, std::int64_t) { workers.run([](std::int64_t) {}); }), std::logic_error);
  EXPECT_THROW(Workers(-1), std::invalid_argument);
}

}  // namespace
}  // namespace unshard::inference
