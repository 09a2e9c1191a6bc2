// Communicators of real processes started from environment variables; peers that die or stall inside a collective.
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <csignal>
#include <functional>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/testing.h"
#include "comm/unique_fd.h"
#include "unshard/comm/communicator.h"
#include "unshard/comm/run_record.h"
#include "unshard/core/error.h"

namespace unshard {
namespace {

using testing::fork_ranks;
using testing::unshared;
using namespace std::chrono_literals;

/// A port of loopback that was free a moment ago; `held` keeps it taken.
int bind_port(comm::UniqueFd& held) {
  held = comm::UniqueFd(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_any;
  socklen_t length = sizeof(address);
  if (::bind(held.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) throw std::runtime_error("bind failed");
  if (::listen(held.get(), 1) != 0) throw std::runtime_error("listen failed");
  ::getsockname(held.get(), reinterpret_cast<sockaddr*>(&address), &length);
  return ntohs(address.sin6_port);
}

int free_port() {
  comm::UniqueFd held;
  return bind_port(held);
}

void set_env(int rank, int size, int port) {
  ::setenv("RANK", std::to_string(rank).c_str(), 1);
  ::setenv("WORLD_SIZE", std::to_string(size).c_str(), 1);
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  ::setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
}

std::string error_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const CommError& error) {
    return error.what();
  }
  return {};
}

bool contains_all(const std::string& text, const std::vector<std::string>& parts) {
  bool all = true;
  for (const auto& part : parts) {
    if (text.find(part) != std::string::npos) continue;
    std::cerr << "missing '" << part << "' in: " << text << std::endl;
    all = false;
  }
  return all;
}

class Processes : public ::testing::TestWithParam<bool> {
 protected:
  CommOptions options() const { return GetParam() ? CommOptions{} : unshared(); }
};
INSTANTIATE_TEST_SUITE_P(Transports, Processes, ::testing::Bool(), [](const auto& info) { return info.param ? "shared" : "gloo"; });

TEST_P(Processes, InitProcessGroupFromTheEnvironment) {
  const int port = free_port();
  const auto exits = fork_ranks(3, 60, [&](int rank) {
    set_env(rank, 3, port);
    const auto comm = init_process_group(options());
    if (comm->rank() != rank || comm->world_size() != 3 || (comm->host() != nullptr) != GetParam()) return 1;
    at::Tensor sum = at::full({1000}, rank + 1, at::kFloat);
    comm->all_reduce(sum);
    if (!at::equal(sum, at::full({1000}, 6, at::kFloat))) return 2;
    const auto service = comm->new_process_group("service");
    if (!service) return 3;
    comm->barrier("end");
    return 0;
  });
  for (const auto& exit : exits) EXPECT_EQ(exit.code, 0);
}

TEST_P(Processes, ADeadPeerEndsACollectiveAndIsNamed) {
  const int port = free_port();
  const auto exits = fork_ranks(3, 60, [&](int rank) {
    set_env(rank, 3, port);
    const auto comm = init_process_group(options());
    comm->set_step(5);
    at::Tensor tensor = at::zeros({4 << 20}, at::kFloat);
    comm->all_reduce(tensor);
    if (rank == 2) {
      std::this_thread::sleep_for(50ms);
      ::raise(SIGKILL);
    }
    const auto started = std::chrono::steady_clock::now();
    const auto error = error_of([&] { comm->all_reduce(tensor, ReduceOp::sum, "bucket 3: blocks.1.up.weight"); });
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
    if (!contains_all(error, {"rank 2", "gone", "all_reduce 'bucket 3: blocks.1.up.weight'", "this is rank " + std::to_string(rank)}))
      return 1;
    if (seconds > 1.05) return 2;
    std::this_thread::sleep_for(1s);  // so that the other survivor sees rank 2's end and not this rank's
    return contains_all(error_of([&] { comm->barrier("again"); }), {"can't be used any more", "rank 2"}) ? 0 : 3;
  });
  EXPECT_EQ(exits[0].code, 0);
  EXPECT_EQ(exits[1].code, 0);
  EXPECT_EQ(exits[2].signal, SIGKILL);
}

TEST_P(Processes, ADeadPeerEndsABarrier) {
  const int port = free_port();
  const auto exits = fork_ranks(2, 60, [&](int rank) {
    set_env(rank, 2, port);
    const auto comm = init_process_group(options());
    comm->barrier("begin");
    if (rank == 1) ::raise(SIGKILL);
    return contains_all(error_of([&] { comm->barrier("step: publish"); }), {"barrier 'step: publish'", "rank 1", "gone"}) ? 0 : 1;
  });
  EXPECT_EQ(exits[0].code, 0);
}

TEST_P(Processes, AStalledPeerEndsInATimeOut) {
  const int port = free_port();
  const auto exits = fork_ranks(2, 60, [&](int rank) {
    set_env(rank, 2, port);
    CommOptions patience = options();
    patience.timeout = std::chrono::duration<double>(2);
    const auto comm = init_process_group(patience);
    comm->barrier("begin");
    if (rank == 1) {
      std::this_thread::sleep_for(3500ms);
      return 0;
    }
    at::Tensor tensor = at::zeros({100}, at::kFloat);
    return contains_all(error_of([&] { comm->all_reduce(tensor, ReduceOp::sum, "norm"); }), {"all_reduce 'norm'", "this is rank 0"}) ? 0
                                                                                                                                     : 1;
  });
  EXPECT_EQ(exits[0].code, 0);
}

TEST_P(Processes, RanksInDifferentCallsAreBothNamedAtOnce) {
  const int port = free_port();
  const auto exits = fork_ranks(2, 60, [&](int rank) {
    set_env(rank, 2, port);
    const auto comm = init_process_group(options());
    comm->check_all_in("step()");
    const auto started = std::chrono::steady_clock::now();
    const auto error = error_of([&] { comm->check_all_in(rank == 0 ? "save(tag=a)" : "load(tag=a)"); });
    if (std::chrono::steady_clock::now() - started > 1s) return 1;
    std::this_thread::sleep_for(300ms);  // rank 0 serves the store
    return contains_all(error, {"rank 0 is in save(tag=a)", "rank 1 is in load(tag=a)"}) ? 0 : 2;
  });
  EXPECT_EQ(exits[0].code, 0);
  EXPECT_EQ(exits[1].code, 0);
}

TEST(ProcessErrors, APeerThatMissesACallIsSeenWhereItIs) {
  const int port = free_port();
  const auto exits = fork_ranks(2, 60, [&](int rank) {
    set_env(rank, 2, port);
    CommOptions options;
    options.collective_check = std::chrono::duration<double>(0.3);
    const auto comm = init_process_group(options);
    comm->host()->set_phase(Phase::backward, 3, "blocks.1.up.weight");
    comm->barrier("both in backward");
    if (rank == 1) {
      std::this_thread::sleep_for(800ms);
      return 0;
    }
    return contains_all(error_of([&] { comm->check_all_in("save(tag=a)"); }),
                        {"0.3 s", "rank 0 is in save(tag=a)", "rank 1 is in backward of step 3 at 'blocks.1.up.weight'"})
               ? 0
               : 1;
  });
  EXPECT_EQ(exits[0].code, 0);
}

/// Collectives of several kinds, one after the other, for ever.
void run_collectives(Communicator& comm) {
  const std::int64_t world = comm.world_size();
  at::Tensor slice = at::zeros({50'000}, at::kFloat), whole = at::zeros({50'000 * world}, at::kFloat);
  for (;;) {
    comm.all_gather(whole, slice, "w");
    comm.reduce_scatter(slice, whole, ReduceOp::sum, "g");
    comm.all_reduce(slice, ReduceOp::sum, "norm");
    comm.barrier("step");
    comm.all_gather_strings("text");
    comm.broadcast(slice, 1, "b");
  }
}

struct Loss {
  std::vector<int> hosts;  ///< by rank
  int victim;
};

class LostOnSeveralHosts : public ::testing::TestWithParam<Loss> {};
INSTANTIATE_TEST_SUITE_P(Ranks, LostOnSeveralHosts,
                         ::testing::Values(Loss{{0, 0, 1, 1}, 0}, Loss{{0, 0, 1, 1}, 1}, Loss{{0, 0, 1, 1}, 2}, Loss{{0, 0, 1, 1}, 3},
                                           Loss{{0, 1, 0, 1}, 3}, Loss{{0, 1, 1, 1}, 0}, Loss{{0, 1}, 1}));

TEST_P(LostOnSeveralHosts, AKilledRankIsNamedByAllOthers) {
  const auto& [hosts, victim] = GetParam();
  const int size = static_cast<int>(hosts.size()), port = free_port();
  const auto exits = fork_ranks(size, 60, [&](int rank) {
    set_env(rank, size, port);
    CommOptions options;
    options.host_name = "host " + std::to_string(GetParam().hosts[static_cast<std::size_t>(rank)]);
    const auto comm = init_process_group(options);
    if (comm->hosts() != GetParam().hosts) return 3;
    comm->barrier("begin");
    if (rank == GetParam().victim)
      std::thread([] {
        std::this_thread::sleep_for(200ms);
        ::raise(SIGKILL);
      }).detach();
    const auto started = std::chrono::steady_clock::now();
    const auto error = error_of([&] { run_collectives(*comm); });
    if (std::chrono::steady_clock::now() - started > 10s) return 2;
    const std::string name = "rank " + std::to_string(GetParam().victim);
    const bool named = error.find(name + " is gone") != std::string::npos || error.find(name + " (pid") != std::string::npos;
    if (!named) std::cerr << "rank " << rank << " says: " << error << std::endl;
    return named && contains_all(error, {"gone", "this is rank " + std::to_string(rank)}) ? 0 : 1;
  });
  for (int rank = 0; rank < size; ++rank) {
    const auto& exit = exits[static_cast<std::size_t>(rank)];
    EXPECT_EQ(exit.signal, rank == victim ? SIGKILL : 0) << "rank " << rank;
    EXPECT_EQ(exit.code, rank == victim ? -1 : 0) << "rank " << rank;
  }
}

// One that gives up (an interrupt, say) tells why; nobody waits for the time-out.
class GivesUp : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Memory, GivesUp, ::testing::Bool(), [](const auto& info) { return info.param ? "hosts" : "unshared"; });

TEST_P(GivesUp, TheRanksThatShareNoMemoryWithItHearWhy) {
  const int port = free_port();
  const auto exits = fork_ranks(4, 60, [&](int rank) {
    set_env(rank, 4, port);
    CommOptions options;
    options.share_memory = GetParam();
    if (GetParam()) options.host_name = rank < 2 ? "left" : "right";
    bool interrupted = false;
    options.interrupt_check = [&] {
      if (interrupted) throw CommError("the user has had enough");
    };
    const auto comm = init_process_group(options);
    comm->barrier("begin");
    if (rank == 0) {
      interrupted = true;
      const auto error = error_of([&] { comm->barrier("step"); });
      std::this_thread::sleep_for(2s);  // its end must not be what the others see
      return contains_all(error, {"had enough"}) ? 0 : 1;
    }
    if (rank == 3) std::this_thread::sleep_for(500ms);  // so that rank 0 has to wait
    const auto started = std::chrono::steady_clock::now();
    const auto error = error_of([&] { run_collectives(*comm); });
    if (std::chrono::steady_clock::now() - started > 5s) return 2;
    return contains_all(error, {"rank 0", "failed", "the user has had enough"}) ? 0 : 1;
  });
  for (const auto& exit : exits) EXPECT_EQ(exit.code, 0);
}

// Two groups over the same ranks, whose barriers are called in opposite orders: each rank waits in a group that no other is in.
class OppositeOrder : public ::testing::TestWithParam<std::vector<std::string>> {};
INSTANTIATE_TEST_SUITE_P(Hosts, OppositeOrder,
                         ::testing::Values(std::vector<std::string>{"a", "a", "a"}, std::vector<std::string>{"a", "b", "b"}));

TEST_P(OppositeOrder, SaysInWhichGroupEachRankWaits) {
  const int port = free_port(), another = free_port();
  const auto exits = fork_ranks(3, 60, [&](int rank) {
    set_env(rank, 3, port);
    CommOptions options;
    options.host_name = GetParam()[static_cast<std::size_t>(rank)];
    options.timeout = std::chrono::duration<double>(4);
    RunRecordOptions recording;
    recording.rank = rank;
    recording.world_size = 3;
    options.record = RunRecord::start(recording);
    const auto first = init_process_group(options);
    ::setenv("MASTER_PORT", std::to_string(another).c_str(), 1);
    const auto second = init_process_group(options);
    Communicator &mine = rank == 0 ? *first : *second, &other = rank == 0 ? *second : *first;
    const auto error = error_of([&] { mine.barrier(rank == 0 ? "first" : "second"), other.barrier("later"); });
    std::this_thread::sleep_for(3s);  // rank 0 serves the store, and none ends before all have said theirs
    return contains_all(error, {rank == 0 ? "rank 1" : "rank 0",
                                rank == 0 ? "[comm.barrier 'second'] of another group, 'world 1'"
                                          : "[comm.barrier 'first'] of another group, 'world 0'",
                                "in the same order"})
               ? 0
               : 1;
  });
  for (const auto& exit : exits) EXPECT_EQ(exit.code, 0);
}

struct Mismatch {
  const char *theirs, *ours;
  std::vector<std::string> named;
};
class DifferentCalls : public ::testing::TestWithParam<Mismatch> {};
INSTANTIATE_TEST_SUITE_P(Pairs, DifferentCalls,
                         ::testing::Values(Mismatch{"all_reduce", "all_gather", {"all_reduce 'theirs'", "all_gather 'ours'"}},
                                           Mismatch{"all_reduce", "check_all_in", {"all_reduce 'theirs'", "save(tag=a)"}},
                                           Mismatch{"barrier", "all_gather", {"barrier 'theirs'", "all_gather 'ours'"}},
                                           Mismatch{"barrier", "check_all_in", {"barrier 'theirs'", "save(tag=a)"}},
                                           Mismatch{
                                               "small all_reduce", "all_reduce", {"all_reduce 'theirs'", "all_reduce 'ours'", "bytes"}}));

// Two hosts: nothing compares their calls but what the ranks say of themselves.
TEST_P(DifferentCalls, OfHostsAreBothNamed) {
  const auto& pair = GetParam();
  const int port = free_port();
  const auto exits = fork_ranks(2, 60, [&](int rank) {
    set_env(rank, 2, port);
    CommOptions options;
    options.host_name = rank == 0 ? "left" : "right";
    options.timeout = 20s;
    const auto comm = init_process_group(options);
    comm->barrier("begin");
    const std::string op = rank == 0 ? pair.theirs : pair.ours, detail = rank == 0 ? "theirs" : "ours";
    at::Tensor large = at::zeros({4000}, at::kFloat), twice = at::zeros({8000}, at::kFloat), small = at::zeros({40}, at::kFloat);
    const auto started = std::chrono::steady_clock::now();
    const auto error = error_of([&] {
      if (op == "all_reduce") comm->all_reduce(large, ReduceOp::sum, detail);
      if (op == "small all_reduce") comm->all_reduce(small, ReduceOp::sum, detail);
      if (op == "all_gather") comm->all_gather(twice, large, detail);
      if (op == "barrier") comm->barrier(detail);
      if (op == "check_all_in") comm->check_all_in("save(tag=a)");
      comm->barrier("after");
    });
    if (std::chrono::steady_clock::now() - started > 8s) return 2;
    std::this_thread::sleep_for(2s);  // rank 0 serves the store
    return contains_all(error, pair.named) && contains_all(error, {"different calls", "rank 0 ", "rank 1 "}) ? 0 : 1;
  });
  for (const auto& exit : exits) EXPECT_EQ(exit.code, 0);
}

enum class Memory { shared, unshared, hosts };

CommOptions options_in(Memory memory, int rank) {
  CommOptions options;
  options.timeout = std::chrono::duration<double>(2.5);
  options.share_memory = memory != Memory::unshared;
  if (memory == Memory::hosts) options.host_name = rank == 0 ? "left" : "right";
  return options;
}

/// Rank 0 waits for a message that rank 1 doesn't send.
class UnansweredPair : public ::testing::TestWithParam<Memory> {
 protected:
  /// \param peer  what rank 1 does instead.
  void expect(const std::function<void(Communicator&)>& peer, const std::vector<std::string>& named, double limit_s, int signal = 0) {
    const int port = free_port();
    const auto exits = fork_ranks(2, 60, [&](int rank) {
      set_env(rank, 2, port);
      const auto comm = init_process_group(options_in(GetParam(), rank));
      comm->set_step(4);
      comm->barrier("begin");
      if (rank == 1) {
        if (comm->local_host()) comm->local_host()->set_phase(Phase::forward, 4, "blocks.1.w");
        peer(*comm);
        return 0;
      }
      at::Tensor tensor = at::zeros({1000}, at::kFloat);
      const auto started = std::chrono::steady_clock::now();
      const auto error = error_of([&] { comm->recv(tensor, 1, 7); });
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
      std::this_thread::sleep_for(500ms);  // rank 0 serves the store
      if (!contains_all(error, named) || !contains_all(error, {"[comm.recv 'from rank 1, tag 7']", "this is rank 0 of 2"})) return 1;
      return seconds.count() < limit_s ? 0 : 2;
    });
    EXPECT_EQ(exits[0].code, 0) << exits[0].seconds << " s";
    EXPECT_EQ(exits[1].signal, signal);
  }
};
std::string memory_name(const ::testing::TestParamInfo<Memory>& info) {
  return info.param == Memory::shared ? "shared" : info.param == Memory::unshared ? "unshared" : "hosts";
}
INSTANTIATE_TEST_SUITE_P(Memories, UnansweredPair, ::testing::Values(Memory::shared, Memory::unshared, Memory::hosts), memory_name);

TEST_P(UnansweredPair, SaysThatThePeerDoesSomethingElse) {
  const auto busy =
      GetParam() == Memory::shared ? "rank 1: forward, step 4, at 'blocks.1.w'" : "rank 1 waits for nobody that is known: its host (";
  expect([](Communicator&) { std::this_thread::sleep_for(5s); }, {busy, "step 4"}, 5);
}

TEST_P(UnansweredPair, SaysInWhichCollectiveThePeerWaits) {
  expect([](Communicator& comm) { (void)error_of([&] { comm.barrier("b"); }); }, {"rank 1", "waiting in", "[comm.barrier 'b']", "step 4"},
         5);
}

TEST_P(UnansweredPair, NamesThePeerThatDied) {
  const auto die = [](Communicator&) {
    std::this_thread::sleep_for(300ms);
    ::raise(SIGKILL);
  };
  expect(die, {"rank 1", "gone", "step 4"}, 2, SIGKILL);
}

TEST(ProcessErrors, ATakenPortIsOneLine) {
  comm::UniqueFd held;
  const int port = bind_port(held);
  const auto exits = fork_ranks(1, 60, [&](int) {
    set_env(0, 2, port);
    const auto error = error_of([] { init_process_group(); });
    return contains_all(error, {"MASTER_PORT", std::to_string(port)}) && error.find('\n') == std::string::npos ? 0 : 1;
  });
  EXPECT_EQ(exits[0].code, 0);
}

TEST(ProcessErrors, AMissingRankIsNamed) {
  const int port = free_port();
  const auto exits = fork_ranks(1, 60, [&](int) {
    set_env(0, 2, port);
    CommOptions options;
    options.timeout = std::chrono::duration<double>(0.5);
    return contains_all(error_of([&] { init_process_group(options); }),
                        {"rank 1 hasn't come", "0.5 s", "WORLD_SIZE", "this is rank 0 of 2"})
               ? 0
               : 1;
  });
  EXPECT_EQ(exits[0].code, 0);
}

}  // namespace
}  // namespace unshard
