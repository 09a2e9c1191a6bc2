// Several hosts: what crosses between them, to the byte; pieces in several turns; hosts whose ranks aren't neighbours.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <mutex>
#include <numeric>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/gloo_group.h"
#include "comm/host_map.h"
#include "comm/route.h"
#include "comm/testing.h"
#include "unshard/comm/communicator.h"

namespace unshard {
namespace {

using namespace std::chrono_literals;
using testing::run_hosts;

const std::vector<std::vector<int>> kHosts{{1, 1}, {2, 2}, {1, 3}, {2, 1, 1}, {3, 2}};

std::string text(const std::vector<int>& hosts) {
  std::string result;
  for (int ranks : hosts) result += (result.empty() ? "{" : ", ") + std::to_string(ranks);
  return result + "}";
}

TEST(HostMap, NumbersHostsByTheirFirstRank) {
  const comm::HostMap map(std::vector<std::string>{"b", "a", "b", "c", "a"});
  EXPECT_EQ(map.host, (std::vector<int>{0, 1, 0, 2, 1}));
  EXPECT_EQ(map.local, (std::vector<int>{0, 0, 1, 0, 1}));
  EXPECT_EQ(map.ranks, (std::vector<std::vector<int>>{{0, 2}, {1, 4}, {3}}));
  const comm::HostMap part = map.subset({4, 3, 1});
  EXPECT_EQ(part.host, (std::vector<int>{0, 1, 0}));
  EXPECT_EQ(part.ranks, (std::vector<std::vector<int>>{{0, 2}, {1}}));
}

// What one rank sends to another is what that one expects of it, in the same order, for every kind of route.
TEST(Routes, SendersAndReceiversAgree) {
  for (const auto& hosts : std::vector<std::vector<int>>{{1, 1}, {2, 2}, {1, 3}, {2, 1, 1}, {3, 2, 4}}) {
    const comm::HostMap map = comm::blocks_of_ranks(hosts);
    const int world = map.world_size();
    std::vector<std::function<comm::Route(int)>> kinds{
        [&](int r) { return comm::gather_route(map, r); }, [&](int r) { return comm::scatter_route(map, r); },
        [&](int r) { return comm::spread_route(map, r); }, [&](int r) { return comm::all_to_all_route(map, r); },
        [&](int r) { return comm::leaders_route(map, r); }};
    for (int root = 0; root < world; ++root) kinds.push_back([&map, root](int r) { return comm::broadcast_route(map, r, root); });
    for (std::size_t kind = 0; kind < kinds.size(); ++kind)
      for (int from = 0; from < world; ++from)
        for (int to = 0; to < world; ++to) {
          std::vector<int> sent, expected;
          for (const auto& leg : kinds[kind](from).sends)
            if (leg.peer == to) sent.push_back(leg.piece);
          for (const auto& leg : kinds[kind](to).receives)
            if (leg.peer == from) expected.push_back(leg.piece);
          EXPECT_EQ(sent, expected) << text(hosts) << " kind " << kind << ", rank " << from << " to " << to;
          if (map.host[static_cast<std::size_t>(from)] == map.host[static_cast<std::size_t>(to)]) {
            EXPECT_TRUE(sent.empty());
          }
        }
  }
}

/// Bytes that left each host in `call`.
std::vector<std::int64_t> crossed(const std::vector<int>& hosts, const std::function<void(int, Communicator&)>& call) {
  std::vector<std::int64_t> bytes(hosts.size());
  std::mutex mutex;
  run_hosts(hosts, {}, [&](int rank, Communicator& comm) {
    comm.barrier("begin");
    comm.reset_counts();
    call(rank, comm);
    const auto& counts = comm.counts();
    const auto found = counts.find(std::string(kHostLink));
    const std::int64_t mine = found == counts.end() ? 0 : found->second.bytes;
    const auto host = static_cast<std::size_t>(comm.hosts()[static_cast<std::size_t>(rank)]);
    {
      const std::lock_guard lock(mutex);
      bytes[host] += mine;
    }
    comm.barrier("counted");
  });
  return bytes;
}

TEST(Hosts, BytesBetweenHostsEqualTheFormulas) {
  for (const auto& hosts : kHosts) {
    SCOPED_TRACE(text(hosts));
    const std::int64_t world = std::accumulate(hosts.begin(), hosts.end(), 0), others = static_cast<std::int64_t>(hosts.size()) - 1;
    constexpr std::int64_t kSlice = 3001, kBytes = 2 * kSlice;  // bf16
    const auto whole = [&] { return at::ones({kSlice * world}, at::kBFloat16); };
    const auto slice = [] { return at::ones({kSlice}, at::kBFloat16); };

    const auto gathered = crossed(hosts, [&](int, Communicator& comm) {
      at::Tensor output = whole();
      comm.all_gather(output, slice());
    });
    const auto scattered = crossed(hosts, [&](int, Communicator& comm) {
      at::Tensor output = slice();
      comm.reduce_scatter(output, whole());
    });
    const auto by_host = crossed(hosts, [&](int, Communicator& comm) {
      at::Tensor output = at::empty({kSlice * (others + 1)}, at::kBFloat16);
      comm.reduce_scatter_by_host(output, whole());
    });
    const auto exchanged = crossed(hosts, [&](int, Communicator& comm) {
      at::Tensor output = at::empty_like(whole());
      comm.all_to_all(output, whole());
    });
    const auto sent = crossed(hosts, [&](int, Communicator& comm) {
      at::Tensor tensor = whole();
      comm.broadcast(tensor, 1);
    });
    const auto reduced = crossed(hosts, [&](int, Communicator& comm) {
      at::Tensor tensor = whole();
      comm.all_reduce(tensor);
    });
    const auto reduced_large = crossed(hosts, [&](int, Communicator& comm) {
      at::Tensor tensor = at::ones({40'000 * world}, at::kBFloat16);
      comm.all_reduce(tensor);
    });
    const std::size_t root_host = hosts[0] > 1 ? 0 : 1;
    for (std::size_t h = 0; h < hosts.size(); ++h) {
      SCOPED_TRACE("host " + std::to_string(h));
      const std::int64_t ranks = hosts[h];
      EXPECT_EQ(gathered[h], kBytes * ranks * others);
      EXPECT_EQ(scattered[h], kBytes * (world - ranks));
      EXPECT_EQ(by_host[h], kBytes * (world - ranks));
      EXPECT_EQ(exchanged[h], kBytes * ranks * (world - ranks));
      EXPECT_EQ(sent[h], h == root_host ? kBytes * world * others : 0);
      EXPECT_EQ(reduced[h], kBytes * world * others);
      EXPECT_EQ(reduced_large[h], 80'000 * (world - ranks + ranks * others));
    }
  }
}

at::Tensor values(int rank, std::int64_t numel) { return (at::arange(numel, at::kLong) * (rank + 3) % 1001).to(at::kFloat); }

/// Every collective on sizes that take many turns, against its definition.
void check_large(int rank, Communicator& comm) {
  const std::int64_t world = comm.world_size(), slice = 700'001;
  std::vector<at::Tensor> parts;
  at::Tensor sum = at::zeros({slice * world}, at::kFloat);
  for (int r = 0; r < world; ++r) {
    parts.push_back(values(r, slice));
    sum += values(r, slice * world);
  }
  at::Tensor whole = at::empty({slice * world}, at::kFloat), mine = at::empty({slice}, at::kFloat);
  for (int round = 0; round < 2; ++round) {
    comm.all_gather(whole, values(rank, slice));
    EXPECT_TRUE(at::equal(whole, at::cat(parts)));
    comm.reduce_scatter(mine, values(rank, slice * world));
    EXPECT_TRUE(at::equal(mine, sum.narrow(0, slice * rank, slice)));
    whole = values(rank, slice * world);
    comm.all_reduce(whole);
    EXPECT_TRUE(at::equal(whole, sum));
    whole = values(rank, slice * world);
    comm.broadcast(whole, 1);
    EXPECT_TRUE(at::equal(whole, values(1, slice * world)));
    comm.all_to_all(whole, values(rank, slice * world));
    for (int r = 0; r < world; ++r)
      EXPECT_TRUE(at::equal(whole.narrow(0, slice * r, slice), values(r, slice * world).narrow(0, slice * rank, slice)));
  }
}

TEST(Hosts, LargeTensorsGoInSeveralTurns) {
  for (const auto& hosts : std::vector<std::vector<int>>{{2, 2}, {1, 2}, {2, 1, 1}}) {
    SCOPED_TRACE(text(hosts));
    run_hosts(hosts, {}, check_large);
  }
}

TEST(Hosts, PartsOfHostsComeInOrderRoundedOnceEach) {
  for (const auto& hosts : kHosts) {
    SCOPED_TRACE(text(hosts));
    run_hosts(hosts, {}, [&](int rank, Communicator& comm) {
      for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf})
        for (const std::int64_t slice : {1, 7, 200'003}) {
          const std::int64_t world = comm.world_size();
          const auto input = [&](int r) {
            return ((at::arange(slice * world, at::kFloat) * 0.7310585f + static_cast<float>(r)).sin() * (r == 1 ? 1e3 : 1.0)).to(dtype);
          };
          std::vector<at::Tensor> wanted;
          int next = 0;
          for (const int ranks : hosts) {
            at::Tensor part = input(next++).to(at::kFloat);
            for (int i = 1; i < ranks; ++i) part += input(next++).to(at::kFloat);
            wanted.push_back(part.to(dtype).narrow(0, slice * rank, slice));
          }
          at::Tensor output = at::empty({slice * static_cast<std::int64_t>(hosts.size())}, dtype);
          comm.reduce_scatter_by_host(output, input(rank));
          EXPECT_TRUE(at::equal(output, at::cat(wanted))) << dtype << ' ' << slice;
        }
    });
  }
}

// Ranks that go round the hosts (0 1 0 1), as cards of an allocation may: names decide, not neighbourhood.
TEST(Hosts, RanksOfAHostNeedNotBeNeighbours) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  testing::run_ranks(4, [&](int rank, Communicator&) {
    CommOptions options;
    options.host_name = rank % 2 ? "odd" : "even";
    const auto group = comm::make_loopback_group(c10::make_intrusive<c10d::PrefixStore>("theirs", store), rank, 4, 30s);
    const auto comm = make_communicator(group, store, options);
    EXPECT_EQ(comm->hosts(), (std::vector<int>{0, 1, 0, 1}));
    EXPECT_EQ(comm->local_host()->rank(), rank / 2);
    check_large(rank, *comm);
    const auto first = comm->subgroup({3, 0, 1}, "first");
    if (first) {
      EXPECT_EQ(first->hosts(), (std::vector<int>{0, 1, 0}));
      EXPECT_EQ(first->local_host()->size(), rank == 0 ? 1 : 2);
      check_large(first->rank(), *first);
      at::Tensor word = at::full({3}, rank);
      if (first->rank() == 0) first->send(word, 2, 5);  // inside a host
      if (first->rank() == 2) first->recv(word, 0, 5);
      if (first->rank() == 0) first->send(word, 1, 6);  // between hosts
      if (first->rank() == 1) first->recv(word, 0, 6);
      EXPECT_EQ(word[0].item<int>(), 3);
      first->barrier("end");
    }
    comm->barrier("end");
  });
}

TEST(Hosts, TheGroupsOfRanksOfOneHostShareItsMemory) {
  run_hosts({2, 2}, {}, [](int rank, Communicator& comm) {
    const auto left = comm.subgroup({0, 1}, "left"), right = comm.subgroup({2, 3}, "right");
    const auto& mine = rank < 2 ? left : right;
    ASSERT_TRUE(mine != nullptr && (rank < 2 ? right : left) == nullptr);
    EXPECT_NE(mine->host(), nullptr);
    at::Tensor sum = at::full({1000}, rank, at::kFloat);
    mine->all_reduce(sum);
    EXPECT_TRUE(at::equal(sum, at::full({1000}, rank < 2 ? 1 : 5, at::kFloat)));
    EXPECT_EQ(mine->counts().count(std::string(kHostLink)), 0u);
    comm.barrier("end");
  });
}

}  // namespace
}  // namespace unshard
