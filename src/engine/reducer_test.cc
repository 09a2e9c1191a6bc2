// Random programs of posts on ranks that diverge, over both transports, with rings of any size: the sums, the bits, and no deadlock.
#include "reducer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "comm/testing.h"
#include "core/soak.h"
#include "flat.h"
#include "gradients.h"
#include "unshard/core/error.h"

namespace unshard::testing {
namespace {

constexpr int kBuckets = 6, kPiece = 3;

BucketPlan some_plan(int world) {
  std::vector<PlannedParameter> parameters;
  for (int id = 0; id < kBuckets; ++id)
    parameters.push_back({id, "p" + std::to_string(id), {kPiece * world, world}, c10::ScalarType::Float, true});
  return plan_buckets(parameters, world, kPiece * world);
}

struct Program {
  int world = 2, epochs = 3;
  unsigned seed = 1;
  std::vector<int> hosts;  ///< ranks on each; empty: one host, or as many as ranks
  bool share_memory = true, overlap = true, discards = false;
  std::int64_t ring_bytes = 1;  ///< the least: two slots
  int delay_us = 0;
  int late_us = 0;  ///< up to so long between a drain's last look and its sleep
};

// What rank r posts in an epoch: a random sequence of buckets, any number of times each; the same for the same seed.
std::vector<int> posts_of(const Program& program, int rank, int epoch) {
  std::mt19937 random(program.seed * 1000003 + static_cast<unsigned>(rank) * 101 + static_cast<unsigned>(epoch));
  std::vector<int> posts(random() % 25);
  for (auto& bucket : posts) bucket = static_cast<int>(random() % kBuckets);
  return posts;
}

float value_of(int rank, int epoch, int post) {
  return 0.1f * static_cast<float>(rank + 1) + 0.013f * static_cast<float>(post) + static_cast<float>(epoch);
}

// accumulator[bucket][rank] after each epoch.
using Sums = std::vector<std::vector<std::vector<float>>>;

Sums run(const Program& program) {
  Sums sums(program.epochs, std::vector<std::vector<float>>(program.world, std::vector<float>(kBuckets, 0)));
  CommOptions options;
  options.share_memory = program.share_memory;
  options.timeout = std::chrono::seconds(30);
  const auto plan = some_plan(program.world);
  const auto communicators =
      program.hosts.empty() ? in_process_communicators(program.world, options) : in_process_hosts(program.hosts, options);
  run_on(communicators, [&](int rank, Communicator& comm) {
    Gradients gradients(plan, rank, false, c10::ScalarType::Float, c10::kCPU);
    ReducerOptions reducing;
    reducing.ring_bytes = program.ring_bytes;
    reducing.overlap = program.overlap;
    std::mt19937 random(program.seed + static_cast<unsigned>(rank));
    if (program.delay_us > 0) {
      reducing.before_reduce = [&](int bucket) { std::this_thread::sleep_for(std::chrono::microseconds(program.delay_us * (bucket % 3))); };
    }
    if (program.late_us > 0) {
      reducing.before_wait = [&] {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % static_cast<unsigned>(program.late_us)));
      };
    }
    const std::shared_ptr<Communicator> shared(&comm, [](Communicator*) {});
    auto reducer = make_reducer(
        plan, shared, c10::kCPU, [&](int bucket, const std::vector<at::Tensor>& slices) { gradients.add(bucket, slices); }, reducing);
    for (int epoch = 0; epoch < program.epochs; ++epoch) {
      const auto post_all = [&](int salt) {
        if (comm.host()) comm.host()->set_phase(Phase::backward, epoch, "test");
        const auto posts = posts_of(program, rank, epoch + salt);
        for (std::size_t i = 0; i < posts.size(); ++i) {
          auto memory = reducer->begin(posts[i]);
          memory.fill_(value_of(rank, epoch, static_cast<int>(i)));
          if (program.delay_us > 0 && random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(program.delay_us));
          reducer->post(posts[i]);
          reducer->poll();
        }
        if (comm.host()) {
          comm.host()->set_phase(Phase::idle, epoch, "test");
          comm.host()->notify();
        }
      };
      if (program.discards && epoch % 2 == 0) {
        post_all(1000);
        reducer->discard();
        gradients.reset();
      }
      post_all(0);
      reducer->drain();
      for (int b = 0; b < kBuckets; ++b) {
        // Buckets are in reverse order of the parameters.
        if (gradients.has(kBuckets - 1 - b)) sums[epoch][rank][b] = gradients.piece(kBuckets - 1 - b).data_ptr<float>()[0];
      }
      comm.barrier("end of epoch");
      gradients.reset();
    }
  });
  return sums;
}

// Round by round, in each the ranks in order, in fp32; on several hosts each host's ranks first.
Sums expected(const Program& program) {
  Sums sums(program.epochs, std::vector<std::vector<float>>(program.world, std::vector<float>(kBuckets, 0)));
  for (int epoch = 0; epoch < program.epochs; ++epoch) {
    for (int b = 0; b < kBuckets; ++b) {
      std::vector<std::vector<float>> rounds(program.world);
      std::size_t most = 0;
      for (int r = 0; r < program.world; ++r) {
        const auto posts = posts_of(program, r, epoch);
        for (std::size_t i = 0; i < posts.size(); ++i) {
          if (posts[i] == b) rounds[r].push_back(value_of(r, epoch, static_cast<int>(i)));
        }
        most = std::max(most, rounds[r].size());
      }
      float sum = 0;
      for (std::size_t k = 0; k < most; ++k) {
        const auto value = [&](int r) { return k < rounds[r].size() ? rounds[r][k] : 0.0f; };
        int rank = 0;
        for (const int ranks : program.hosts.empty() ? std::vector<int>(program.world, 1) : program.hosts) {
          float part = value(rank++);
          for (int i = 1; i < ranks; ++i) part += value(rank++);
          sum += part;
        }
      }
      for (int r = 0; r < program.world; ++r) sums[epoch][r][b] = sum;
    }
  }
  return sums;
}

/// Programs of six epochs on 2 to 4 ranks give what they should; `change` makes each what the test is about.
void expect_long_programs(unsigned first_seed, unsigned count, const std::function<void(Program&)>& change) {
  for (unsigned seed = first_seed; seed < first_seed + count * static_cast<unsigned>(soak()); ++seed) {
    Program program;
    program.seed = seed;
    program.world = 2 + static_cast<int>(seed % 3);
    program.epochs = 6;
    change(program);
    SCOPED_TRACE(cat("seed ", seed));
    EXPECT_EQ(run(program), expected(program));
  }
}

TEST(Reducer, DivergentRanksAddTheSameBitsOnEveryTransport) {
  for (unsigned seed = 1; seed <= 12 * static_cast<unsigned>(soak()); ++seed) {
    Program program;
    program.seed = seed;
    program.world = 2 + static_cast<int>(seed % 3);
    const auto want = expected(program);
    for (const bool overlap : {true, false}) {
      program.overlap = overlap;
      SCOPED_TRACE(cat("seed ", seed, ", overlap ", overlap));
      program.share_memory = true;
      EXPECT_EQ(run(program), want);
      if (seed % 12 > 4) continue;
      program.share_memory = false;
      EXPECT_EQ(run(program), want);
    }
  }
}

// What happens between a drain's last look and its sleep wakes it, whatever else was counted meanwhile.
TEST(Reducer, ADrainMissesNothingThatHappensBeforeItSleeps) {
  expect_long_programs(400, 12, [](Program& program) { program.late_us = 3000; });
}

TEST(Reducer, SeveralHostsAddTheirRanksFirst) {
  unsigned seed = 200;
  for (const auto& hosts : std::vector<std::vector<int>>{{1, 1}, {2, 2}, {1, 3}, {2, 1, 1}}) {
    for (const bool overlap : {true, false}) {
      for (const bool discards : {true, false}) {
        Program program;
        program.seed = ++seed;
        program.hosts = hosts;
        program.world = std::accumulate(hosts.begin(), hosts.end(), 0);
        program.overlap = overlap;
        program.discards = discards;
        program.delay_us = seed % 2 ? 300 : 0;
        SCOPED_TRACE(cat("seed ", seed, ", ", hosts.size(), " hosts, overlap ", overlap, ", discards ", discards));
        EXPECT_EQ(run(program), expected(program));
      }
    }
  }
}

TEST(Reducer, OneRankAHostGivesTheBitsOfRanksThatDoNotShareMemory) {
  for (unsigned seed = 300; seed < 304; ++seed) {
    Program program;
    program.seed = seed;
    program.world = 3;
    program.share_memory = false;
    const auto want = run(program);
    program.share_memory = true;
    program.hosts = {1, 1, 1};
    EXPECT_EQ(run(program), want);
  }
}

// Of 16-bit buckets of [world][slice] elements each host sends a slice for every rank of the others, once.
TEST(Reducer, OnePartialSumADestinationCrossesBetweenHosts) {
  for (const auto& hosts : std::vector<std::vector<int>>{{1, 1}, {2, 2}, {1, 3}, {2, 1, 1}}) {
    const int world = std::accumulate(hosts.begin(), hosts.end(), 0);
    constexpr std::int64_t kSlice = 77;
    const auto plan = plan_buckets({{0, "w", {kSlice * world, world}, c10::ScalarType::BFloat16, true}}, world, kSlice * world);
    std::vector<std::int64_t> crossed(hosts.size());
    std::mutex mutex;
    run_on(in_process_hosts(hosts), [&](int rank, Communicator& comm) {
      const std::shared_ptr<Communicator> shared(&comm, [](Communicator*) {});
      at::Tensor got;
      auto reducer = make_reducer(plan, shared, c10::kCPU,
                                  [&](int, const std::vector<at::Tensor>& slices) {
                                    got = slices[0].to(at::kFloat);
                                    for (std::size_t i = 1; i < slices.size(); ++i) got += slices[i].to(at::kFloat);
                                  },
                                  {});
      reducer->begin(0).fill_(rank + 1);
      reducer->post(0);
      comm.reset_counts();
      reducer->drain();
      EXPECT_TRUE(at::equal(got, at::full({kSlice}, world * (world + 1) / 2, at::kFloat)));
      const auto agreed =
          static_cast<std::int64_t>(plan.buckets.size() + 4) * 8;  // a sign and each rank's counts of rounds, to every other host
      const auto others = static_cast<std::int64_t>(hosts.size()) - 1;
      {
        const std::lock_guard lock(mutex);
        crossed[comm.hosts()[rank]] += comm.counts().at(std::string(kHostLink)).bytes - agreed * others;
      }
      comm.barrier("counted");
    });
    for (std::size_t h = 0; h < hosts.size(); ++h) EXPECT_EQ(crossed[h], kSlice * (world - hosts[h]) * 2) << "host " << h;
  }
}

TEST(Reducer, AFullRingNeverDeadlocks) {
  expect_long_programs(20, 40, [](Program& program) { program.delay_us = program.seed % 2 ? 200 : 0; });
}

TEST(Reducer, DelaysChangeNoBit) {
  for (const bool share_memory : {true, false}) {
    Program program;
    program.world = 3;
    program.seed = 77;
    program.share_memory = share_memory;
    const auto want = run(program);
    program.delay_us = 3000;
    EXPECT_EQ(run(program), want);
  }
}

TEST(Reducer, DiscardDropsWhatWasPostedBefore) {
  for (unsigned seed = 90; seed < 96; ++seed) {
    for (const bool share_memory : {true, false}) {
      Program program;
      program.seed = seed;
      program.world = 2 + static_cast<int>(seed % 2);
      program.share_memory = share_memory;
      program.discards = true;
      program.epochs = 4;
      SCOPED_TRACE(cat("seed ", seed, ", shared ", share_memory));
      EXPECT_EQ(run(program), expected(program));
    }
  }
}

TEST(Reducer, DifferentNumbersOfDiscardsAreAnErrorThatNamesTheRank) {
  for (const bool share_memory : {true, false}) {
    CommOptions options;
    options.share_memory = share_memory;
    const auto plan = some_plan(2);
    std::mutex mutex;
    std::vector<std::string> errors;
    EXPECT_THROW(run_ranks(2, options,
                           [&](int rank, Communicator& comm) {
                             const std::shared_ptr<Communicator> shared(&comm, [](Communicator*) {});
                             auto reducer = make_reducer(plan, shared, c10::kCPU, [](int, const std::vector<at::Tensor>&) {}, {});
                             if (rank == 0) reducer->discard();
                             reducer->begin(0).fill_(1);
                             reducer->post(0);
                             try {
                               reducer->drain();
                             } catch (const CommError& error) {
                               const std::lock_guard lock(mutex);
                               errors.push_back(error.what());
                               throw;
                             }
                           }),
                 std::runtime_error);
    ASSERT_GE(errors.size(), 1u);
    EXPECT_NE(errors[0].find("rank 1 called zero_grad() fewer times"), std::string::npos) << errors[0];
  }
}

}  // namespace
}  // namespace unshard::testing
