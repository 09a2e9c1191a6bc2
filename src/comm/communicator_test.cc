// Collectives against their definitions, on both transports, for every dtype that is moved or reduced.
#include "unshard/comm/communicator.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/gloo_group.h"
#include "comm/testing.h"
#include "unshard/core/error.h"

namespace unshard {
namespace {

using namespace std::chrono_literals;
using testing::run_ranks;
using testing::unshared;

/// Ranks on each host; no sharing: every rank is a host of its own.
struct Case {
  std::vector<int> hosts;
  bool share = true;

  int size() const { return std::accumulate(hosts.begin(), hosts.end(), 0); }
};

std::string name_of(const ::testing::TestParamInfo<Case>& info) {
  std::string name;
  for (int ranks : info.param.hosts) name += std::to_string(ranks) + "_";
  return name + (!info.param.share ? "gloo" : info.param.hosts.size() == 1 ? "shared" : "hosts");
}

class Collectives : public ::testing::TestWithParam<Case> {
 protected:
  int size() const { return GetParam().size(); }
  bool one_host() const { return GetParam().share && GetParam().hosts.size() == 1; }
  /// By rank.
  std::vector<int> hosts() const {
    std::vector<int> hosts;
    for (std::size_t host = 0; host < GetParam().hosts.size(); ++host)
      for (int i = 0; i < GetParam().hosts[host]; ++i) hosts.push_back(GetParam().share ? static_cast<int>(host) : i);
    return hosts;
  }
  CommOptions options() const { return GetParam().share ? CommOptions{} : unshared(); }
  void run(const std::function<void(int, Communicator&)>& fn) const { testing::run_hosts(GetParam().hosts, options(), fn); }
};

INSTANTIATE_TEST_SUITE_P(Ranks, Collectives,
                         ::testing::Values(Case{{1}}, Case{{2}}, Case{{3}}, Case{{4}}, Case{{2}, false}, Case{{3}, false}, Case{{1, 1}},
                                           Case{{2, 2}}, Case{{1, 3}}, Case{{2, 1, 1}}, Case{{2, 3}}),
                         name_of);

/// Small integers that differ by rank and position: sums are exact in every dtype.
at::Tensor values(int rank, std::int64_t numel, at::ScalarType dtype) {
  return (at::arange(numel, at::kLong) * (rank + 3) % 7 - (c10::isSignedType(dtype) ? 3 : 0)).to(dtype);
}

/// Each host's ranks in order, rounded once to the dtype, then the hosts in order, rounded once.
at::Tensor sum_by_host(Communicator& comm, const std::function<at::Tensor(int)>& input) {
  const auto hosts = comm.hosts();
  at::Tensor total;
  for (int host = 0; host <= *std::max_element(hosts.begin(), hosts.end()); ++host) {
    at::Tensor sum;
    for (int rank = 0; rank < comm.world_size(); ++rank) {
      if (hosts[static_cast<std::size_t>(rank)] != host) continue;
      const at::Tensor wide = input(rank).to(at::kFloat);
      sum = sum.defined() ? sum + wide : wide;
    }
    sum = sum.to(input(0).scalar_type()).to(at::kFloat);
    total = total.defined() ? total + sum : sum;
  }
  return total.to(input(0).scalar_type());
}

const std::vector<at::ScalarType> kMoved{at::kFloat, at::kDouble, at::kBFloat16, at::kHalf,
                                         at::kLong,  at::kByte,   at::kBool,     at::kComplexFloat};
const std::vector<at::ScalarType> kReduced{at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong, at::kInt, at::kShort, at::kChar};

/// The last is several pieces, none of them whole; once per element size is enough for it.
std::vector<std::int64_t> sizes_for(at::ScalarType dtype) {
  std::vector<std::int64_t> sizes{0, 1, 3, 17, 1000};
  if (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kLong) sizes.push_back(131'073);
  return sizes;
}

TEST_P(Collectives, AllGatherBringsEveryRanksTensor) {
  run([&](int rank, Communicator& comm) {
    for (auto dtype : kMoved)
      for (auto numel : sizes_for(dtype)) {
        std::vector<at::Tensor> parts;
        for (int r = 0; r < size(); ++r) parts.push_back(values(r, numel, dtype));
        at::Tensor output = at::zeros({numel * size()}, dtype);
        comm.all_gather(output, values(rank, numel, dtype));
        EXPECT_TRUE(at::equal(output, at::cat(parts))) << dtype << ' ' << numel;
      }
  });
}

TEST_P(Collectives, LongGathersAreWholeWhateverTheirPieces) {
  run([&](int rank, Communicator& comm) {
    for (std::int64_t numel : {262'144, 262'145, 700'001}) {  // of 4 bytes: one piece of 1 MiB; a bit more; two and a part
      std::vector<at::Tensor> parts;
      for (int r = 0; r < size(); ++r) parts.push_back(values(r, numel, at::kFloat));
      at::Tensor output = at::zeros({numel * size()}, at::kFloat);
      comm.all_gather(output, values(rank, numel, at::kFloat));
      EXPECT_TRUE(at::equal(output, at::cat(parts))) << numel;
    }
  });
}

at::Tensor reduce_reference(int size, std::int64_t numel, at::ScalarType dtype, ReduceOp op) {
  at::Tensor result = values(0, numel, dtype);
  for (int r = 1; r < size; ++r) {
    const at::Tensor next = values(r, numel, dtype);
    result = op == ReduceOp::sum ? result + next : op == ReduceOp::max ? result.maximum(next) : result.minimum(next);
  }
  return result;
}

TEST_P(Collectives, ReduceScatterLeavesThisRanksSliceOfTheReduction) {
  run([&](int rank, Communicator& comm) {
    for (auto dtype : kReduced)
      for (auto numel : sizes_for(dtype))
        for (auto op : {ReduceOp::sum, ReduceOp::max, ReduceOp::min}) {
          at::Tensor output = at::zeros({numel}, dtype);
          comm.reduce_scatter(output, values(rank, numel * size(), dtype), op);
          EXPECT_TRUE(at::equal(output, reduce_reference(size(), numel * size(), dtype, op).narrow(0, numel * rank, numel)))
              << dtype << ' ' << numel;
        }
  });
}

TEST_P(Collectives, AllReduceGivesEveryRankTheReduction) {
  run([&](int rank, Communicator& comm) {
    for (auto dtype : kReduced)
      for (auto numel : sizes_for(dtype))
        for (auto op : {ReduceOp::sum, ReduceOp::max, ReduceOp::min}) {
          at::Tensor tensor = values(rank, numel, dtype);
          comm.all_reduce(tensor, op);
          EXPECT_TRUE(at::equal(tensor, reduce_reference(size(), numel, dtype, op))) << dtype << ' ' << numel;
        }
  });
}

TEST_P(Collectives, ComplexTensorsAreSummed) {
  run([&](int rank, Communicator& comm) {
    at::Tensor tensor = values(rank, 33, at::kComplexFloat);
    comm.all_reduce(tensor);
    EXPECT_TRUE(at::equal(tensor, reduce_reference(size(), 33, at::kComplexFloat, ReduceOp::sum)));
  });
}

TEST_P(Collectives, BroadcastCopiesTheRoot) {
  run([&](int rank, Communicator& comm) {
    for (auto dtype : kMoved)
      for (auto numel : sizes_for(dtype))
        for (int root = 0; root < size(); ++root) {
          at::Tensor tensor = values(rank, numel, dtype);
          comm.broadcast(tensor, root);
          EXPECT_TRUE(at::equal(tensor, values(root, numel, dtype))) << dtype << ' ' << numel;
        }
  });
}

TEST_P(Collectives, AllToAllTransposesSlices) {
  run([&](int rank, Communicator& comm) {
    for (auto dtype : kMoved)
      for (auto numel : sizes_for(dtype)) {
        std::vector<at::Tensor> wanted;
        for (int r = 0; r < size(); ++r) wanted.push_back(values(r, numel * size(), dtype).narrow(0, numel * rank, numel));
        at::Tensor output = at::zeros({numel * size()}, dtype);
        comm.all_to_all(output, values(rank, numel * size(), dtype));
        EXPECT_TRUE(at::equal(output, at::cat(wanted))) << dtype << ' ' << numel;
      }
  });
}

TEST_P(Collectives, MessagesGoRoundTheRing) {
  if (size() == 1) return;  // there is no peer to send to
  run([&](int rank, Communicator& comm) {
    for (auto numel : {1, 5000, 200'000}) {
      const int next = (rank + 1) % size(), previous = (rank + size() - 1) % size();
      at::Tensor got = at::zeros({numel}, at::kFloat);
      const at::Tensor mine = values(rank, numel, at::kFloat);
      if (rank == 0) comm.send(mine, next, 5);  // a message longer than the ring needs its receiver
      comm.recv(got, previous, 5);
      if (rank != 0) comm.send(mine, next, 5);
      EXPECT_TRUE(at::equal(got, values(previous, numel, at::kFloat)));
    }
  });
}

TEST_P(Collectives, StringsComeInRankOrder) {
  run([&](int rank, Communicator& comm) {
    for (std::size_t length : {0, 1, 4095, 4096, 20'000}) {
      const auto all = comm.all_gather_strings(std::string(length * static_cast<std::size_t>(rank + 1), static_cast<char>('a' + rank)));
      ASSERT_EQ(all.size(), static_cast<std::size_t>(size()));
      for (int r = 0; r < size(); ++r)
        EXPECT_EQ(all[static_cast<std::size_t>(r)], std::string(length * static_cast<std::size_t>(r + 1), static_cast<char>('a' + r)));
    }
  });
}

TEST_P(Collectives, SixteenBitSumsAreRoundedOnceAHost) {
  run([&](int rank, Communicator& comm) {
    // 256 + 1 + 1 ...: in bf16 256 + 1 rounds back to 256, in fp32 the ones add up.
    const auto input = [](int r) { return at::full({64}, r == 0 ? 256.0 : 1.0, at::kBFloat16); };
    const at::Tensor wanted = sum_by_host(comm, input);
    if (one_host()) {
      EXPECT_TRUE(at::equal(wanted, at::full({64}, 256.0 + size() - 1, at::kFloat).to(at::kBFloat16)));
    }
    at::Tensor tensor = input(rank);
    comm.all_reduce(tensor);
    EXPECT_TRUE(at::equal(tensor, wanted));
  });
}

TEST_P(Collectives, SumsAreTheSameBitsAsAddingRanksAndThenHostsInOrder) {
  run([&](int rank, Communicator& comm) {
    const auto uneven = [](int r) {
      return (at::arange(5001, at::kFloat) * 0.7310585f + static_cast<float>(r)).sin() * (r == 1 ? 1e6 : 1.0);
    };
    const at::Tensor wanted = sum_by_host(comm, uneven);
    at::Tensor tensor = uneven(rank).clone();
    comm.all_reduce(tensor);
    EXPECT_TRUE(at::equal(tensor, wanted));
  });
}

TEST_P(Collectives, CountersEqualTheFormulas) {
  run([&](int rank, Communicator& comm) {
    const std::int64_t n = size(), slice = 100, whole_bytes = slice * n * 4;
    at::Tensor part = at::zeros({slice}, at::kFloat), whole = at::zeros({slice * n}, at::kFloat),
               other = at::zeros({slice * n}, at::kFloat);
    comm.all_gather(whole, part);
    comm.reduce_scatter(part, whole);
    comm.all_reduce(whole);
    comm.all_reduce(whole);
    comm.all_to_all(other, whole);
    comm.broadcast(whole, 0);
    const auto& counts = comm.counts();
    EXPECT_EQ(counts.at("all_gather").bytes, whole_bytes * (n - 1) / n);
    EXPECT_EQ(counts.at("reduce_scatter").bytes, whole_bytes * (n - 1) / n);
    EXPECT_EQ(counts.at("all_reduce").bytes, 2 * 2 * whole_bytes * (n - 1) / n);
    EXPECT_EQ(counts.at("all_reduce").calls, 2);
    EXPECT_EQ(counts.at("all_to_all").bytes, whole_bytes * (n - 1) / n);
    EXPECT_EQ(counts.at("broadcast").bytes, rank == 0 && n > 1 ? whole_bytes : 0);
    comm.reset_counts();
    EXPECT_TRUE(comm.counts().empty());
  });
}

TEST_P(Collectives, CallersMistakesAreFoundBeforeCommunication) {
  run([&](int, Communicator& comm) {
    at::Tensor output = at::zeros({4 * size() + 1}, at::kFloat), bools = at::zeros({4}, at::kBool);
    EXPECT_THROW(comm.all_gather(output, at::zeros({4}, at::kFloat)), std::invalid_argument);
    at::Tensor halves = at::zeros({3}, at::kHalf);
    EXPECT_THROW(comm.reduce_scatter(halves, at::zeros({3 * size()}, at::kFloat)), std::invalid_argument);
    EXPECT_THROW(comm.all_reduce(bools), std::invalid_argument);
    EXPECT_THROW(comm.broadcast(output, size()), std::invalid_argument);
    at::Tensor transposed = at::zeros({3, 2}, at::kFloat).t();
    EXPECT_THROW(comm.all_reduce(transposed), std::invalid_argument);
    comm.barrier("after the mistakes");  // the group is still in step
  });
}

// Messages and records of any of them name the step that the run is in.
TEST_P(Collectives, SubgroupsAreInTheStepOfTheirParent) {
  run([&](int rank, Communicator& comm) {
    std::vector<int> all(static_cast<std::size_t>(size()));
    std::iota(all.begin(), all.end(), 0);
    const auto group = comm.subgroup(all, "gradients");
    comm.set_step(7);
    EXPECT_EQ(group->step(), 7);
    group->barrier("end");
  });
}

TEST_P(Collectives, SubgroupsAreGroupsOfTheirOwn) {
  run([&](int rank, Communicator& comm) {
    std::vector<int> even;
    for (int r = 0; r < size(); r += 2) even.push_back(r);
    const auto group = comm.subgroup(even, "even");
    EXPECT_EQ(group != nullptr, rank % 2 == 0);
    if (group) {
      EXPECT_EQ(group->rank(), rank / 2);
      const auto hosts = comm.hosts();
      const bool together = std::all_of(even.begin(), even.end(), [&](int r) { return hosts[static_cast<std::size_t>(r)] == hosts[0]; });
      EXPECT_EQ(group->host() != nullptr, GetParam().share && together);
      EXPECT_EQ(group->local_host() != nullptr, GetParam().share);
      at::Tensor sum = at::full({7}, rank, at::kLong);
      group->all_reduce(sum);
      EXPECT_TRUE(at::equal(sum, at::full({7}, std::accumulate(even.begin(), even.end(), 0), at::kLong)));
    }
    comm.barrier("subgroups done");
  });
}

TEST_P(Collectives, HostsAreNumberedByTheirFirstRankAndHaveGroupsOfTheirOwn) {
  run([&](int rank, Communicator& comm) {
    const auto wanted = hosts();
    EXPECT_EQ(comm.hosts(), wanted);
    EXPECT_EQ(comm.host() != nullptr, one_host());
    HostGroup* here = comm.local_host();
    ASSERT_EQ(here != nullptr, GetParam().share);
    if (!here) return;
    const auto mine = static_cast<std::size_t>(rank);
    EXPECT_EQ(here->size(), std::count(wanted.begin(), wanted.end(), wanted[mine]));
    EXPECT_EQ(here->rank(), std::count(wanted.begin(), wanted.begin() + rank, wanted[mine]));
    std::vector<int> numbers(static_cast<std::size_t>(here->size()));
    here->all_gather_small(&rank, sizeof(rank), numbers.data(), "numbers");
    EXPECT_EQ(numbers[static_cast<std::size_t>(here->rank())], rank);
    EXPECT_TRUE(std::is_sorted(numbers.begin(), numbers.end()));
  });
}

TEST_P(Collectives, OneGroupAndStoreServeSeveralCommunicators) {
  if (size() == 1) return;  // a world of one has no store
  const auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(size(), [&](int rank, Communicator&) {
    auto options = this->options();
    if (GetParam().hosts.size() > 1) options.host_name = "host " + std::to_string(hosts()[static_cast<std::size_t>(rank)]);
    const auto group = comm::make_loopback_group(c10::make_intrusive<c10d::PrefixStore>("theirs", store), rank, size(), 30s);
    for (int i = 0; i < 2; ++i) {
      const auto first = make_communicator(group, store, options), second = make_communicator(group, store, options);
      EXPECT_EQ(first->host() != nullptr, one_host());
      EXPECT_EQ(first->hosts(), hosts());
      at::Tensor ones = at::ones({100}, at::kFloat), more = at::ones({100}, at::kFloat);
      first->all_reduce(ones);
      second->all_reduce(more);
      first->check_all_in("step");
      second->check_all_in("save");
      EXPECT_TRUE(at::equal(ones + more, at::full({100}, 2.0 * size())));
      first->barrier("end");
    }
  });
}

TEST_P(Collectives, RanksInDifferentCollectivesAreAnErrorInSharedMemory) {
  if (size() == 1 || !one_host()) return;  // Gloo doesn't compare
  run([&](int rank, Communicator& comm) {
    at::Tensor tensor = at::zeros({100}, at::kFloat), longer = at::zeros({101}, at::kFloat);
    try {
      comm.all_reduce(rank == 1 ? longer : tensor, ReduceOp::sum, "norm");
      ADD_FAILURE() << "no error on rank " << rank;
    } catch (const CommError& error) {
      EXPECT_THAT(error.what(),
                  ::testing::AllOf(::testing::HasSubstr("'norm'"), ::testing::HasSubstr("400 bytes"), ::testing::HasSubstr("404 bytes")));
    }
    EXPECT_THROW(comm.barrier("after"), CommError);
  });
}

TEST_P(Collectives, ShortMessagesMayBeTakenInAnotherOrder) {
  if (size() == 1 || !one_host()) return;  // Gloo's send waits for its receiver
  run([&](int rank, Communicator& comm) {
    if (rank > 1) return;
    at::Tensor a = at::full({10}, 1.0), b = at::full({20}, 2.0);
    if (rank == 0) {
      comm.send(a, 1, 1);
      comm.send(b, 1, 2);
    } else {
      at::Tensor got_a = at::zeros({10}), got_b = at::zeros({20});
      comm.recv(got_b, 0, 2);
      comm.recv(got_a, 0, 1);
      EXPECT_TRUE(at::equal(got_a, a) && at::equal(got_b, b));
    }
  });
}

TEST(CommunicatorWaits, ASlowSenderIsWaitedForThoughAnotherRankLeft) {
  run_ranks(3, [](int rank, Communicator& comm) {
    if (rank == 1) return;
    at::Tensor tensor = at::full({5}, rank);
    if (rank == 2) {
      std::this_thread::sleep_for(3300ms);  // longer than the grace of waits that can't tell whom they need
      comm.send(tensor, 0);
    } else {
      comm.recv(tensor, 2);
      EXPECT_TRUE(at::equal(tensor, at::full({5}, 2)));
    }
  });
}

TEST_P(Collectives, RecorderKeepsTheLastCalls) {
  run([&](int, Communicator& comm) {
    comm.set_step(12);
    at::Tensor tensor = at::zeros({8}, at::kFloat);
    comm.all_reduce(tensor, ReduceOp::sum, "bucket 3: blocks.0.up.weight");
    const auto records = comm.recorder().snapshot();
    ASSERT_EQ(records.size(), 1u);
    EXPECT_EQ(records[0].op, "all_reduce");
    EXPECT_EQ(records[0].detail, "bucket 3: blocks.0.up.weight");
    EXPECT_EQ(records[0].step, 12);
    EXPECT_GE(records[0].ended_s, records[0].started_s);
  });
}

}  // namespace
}  // namespace unshard
