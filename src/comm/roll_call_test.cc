// Ranks that get to know each other: what is exchanged, and who is named when one ends, stops, gives up or never comes.
#include "comm/roll_call.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/host_identity.h"
#include "comm/testing.h"
#include "unshard/core/error.h"

namespace unshard::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using unshard::testing::fork_ranks;

RollCallOptions patience(double seconds) { return {"test", std::chrono::duration<double>(seconds), {}}; }

/// `body(rank, roll)` on a thread for each rank; their errors, empty where there was none.
std::vector<std::string> on_threads(int size, double timeout_s, const std::function<void(int, RollCall&)>& body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      RollCall roll(store, rank, size, patience(timeout_s));
      try {
        body(rank, roll);
      } catch (const CommError& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
        roll.fail(error.what());
      }
    });
  for (auto& thread : threads) thread.join();
  return errors;
}

TEST(RollCall, EveryRankGetsTheTextsOfAllByRank) {
  const auto errors = on_threads(5, 20, [](int rank, RollCall& roll) {
    for (int round = 0; round < 20; ++round) {
      std::vector<std::string> wanted;
      const auto text = [&](int of) { return std::string(static_cast<std::size_t>(of * 40'000 * (round % 2)), 'x') + cat(of, "/", round); };
      for (int of = 0; of < 5; ++of) wanted.push_back(text(of));
      if (rank == round % 5) std::this_thread::sleep_for(2ms);
      EXPECT_EQ(roll.exchange(text(rank), "texts"), wanted);
    }
    roll.finish();
  });
  EXPECT_THAT(errors, ::testing::Each(""));
}

TEST(RollCall, ARankThatGivesUpIsQuoted) {
  for (const int culprit : {0, 1, 2}) {
    const auto errors = on_threads(3, 20, [&](int rank, RollCall& roll) {
      roll.exchange("", "the meeting");
      if (rank == culprit) throw CommError("no memory left\nand a backtrace");
      roll.finish();
    });
    for (int rank = 0; rank < 3; ++rank)
      if (rank != culprit) {
        EXPECT_THAT(errors[static_cast<std::size_t>(rank)],
                    HasSubstr(cat("rank ", culprit, " failed: no memory left; this is rank ", rank)));
      }
  }
}

TEST(RollCall, ARankThatNeverComesIsNamed) {
  for (const int absent : {0, 2}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 3; ++rank)
      if (rank != absent)
        threads.emplace_back([&, rank] {
          RollCall roll(store, rank, 3, patience(0.6));
          const auto began = std::chrono::steady_clock::now();
          try {
            roll.exchange("", "the meeting");
            ADD_FAILURE() << "nobody was missing";
          } catch (const CommError& error) {
            EXPECT_THAT(error.what(), HasSubstr(cat("rank ", absent, " hasn't come")));
            EXPECT_THAT(error.what(), HasSubstr("the meeting"));
          }
          EXPECT_LT(std::chrono::steady_clock::now() - began, 3s);
          std::this_thread::sleep_for(1s);  // so that the other finds out for itself
        });
    for (auto& thread : threads) thread.join();
  }
}

TEST(RollCall, ARankThatLeftInOrderIsNobodysError) {
  const auto errors = on_threads(3, 20, [](int rank, RollCall& roll) {
    roll.finish();
    if (rank == 1) std::this_thread::sleep_for(300ms);
    EXPECT_NO_THROW(roll.check());
  });
  EXPECT_THAT(errors, ::testing::Each(""));
}

struct Blow {
  int victim, signal;
};
void PrintTo(const Blow& blow, std::ostream* out) { *out << "rank " << blow.victim << (blow.signal == SIGKILL ? " killed" : " stopped"); }

/// A TCPStore's server in a process of its own: it outlives rank 0, and the test's process stays without threads, so that it may fork.
class StoreServer {
 public:
  StoreServer() {
    int ends[2];
    if (::pipe(ends) != 0) throw std::runtime_error("pipe failed");
    pid_ = ::fork();
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      c10d::TCPStoreOptions options;
      options.port = 0;
      options.isServer = true;
      options.waitWorkers = false;
      const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
      const std::uint16_t port = store->getPort();
      if (::write(ends[1], &port, sizeof(port)) != sizeof(port)) ::_exit(1);
      for (;;) ::pause();
    }
    ::close(ends[1]);
    if (::read(ends[0], &port_, sizeof(port_)) != sizeof(port_)) throw std::runtime_error("no server");
    ::close(ends[0]);
  }
  ~StoreServer() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;
  std::uint16_t port() const { return port_; }

 private:
  pid_t pid_ = 0;
  std::uint16_t port_ = 0;
};
class Struck : public ::testing::TestWithParam<Blow> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Struck,
                         ::testing::Values(Blow{0, SIGKILL}, Blow{1, SIGKILL}, Blow{2, SIGKILL}, Blow{0, SIGSTOP}, Blow{2, SIGSTOP}));

// Killed: known at once, wherever the others are. Stopped: known at the time-out.
TEST_P(Struck, TheOthersNameIt) {
  const auto [victim, signal] = GetParam();
  constexpr double kTimeout_s = 4;
  const StoreServer server;
  const auto exits = fork_ranks(3, 10, [&, victim = victim, signal = signal](int rank) {
    c10d::TCPStoreOptions options;
    options.port = server.port();
    options.waitWorkers = false;
    const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    RollCall roll(store, rank, 3, patience(kTimeout_s));
    roll.exchange("", "the meeting");
    roll.set_place("'connections'");
    const auto began = std::chrono::steady_clock::now();
    if (rank == victim) {
      std::this_thread::sleep_for(300ms);
      ::raise(signal);
    }
    try {
      roll.exchange("", "'memory'");
      return 1;
    } catch (const CommError& error) {
      const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
      const std::string text = error.what(), killed = cat("rank ", victim, " is gone"),
                        stopped = cat("rank ", victim, " gives no sign of life");
      const bool named = signal == SIGKILL ? text.find(killed) != std::string::npos && took < 3
                                           : text.find(stopped) != std::string::npos && took < kTimeout_s + 3;
      if (!named) std::cerr << "rank " << rank << " after " << took << " s: " << text << std::endl;
      roll.fail(text);
      return named ? 0 : 2;
    }
  });
  for (int rank = 0; rank < 3; ++rank)
    if (rank != victim) {
      EXPECT_EQ(exits[static_cast<std::size_t>(rank)].code, 0) << "rank " << rank;
    }
}

TEST(HostIdentity, TheMachineIsTheSameUnderAnyName) {
  EXPECT_EQ(machine_of(host_identity("left")), machine_of(host_identity("right")));
  EXPECT_EQ(machine_of(host_identity("two words")), machine_of(host_identity()));
  EXPECT_NE(machine_of("named a on boot-1 pid:[1] net:[2] ipc:[3] 0"), machine_of("named a on boot-1 pid:[1] net:[9] ipc:[3] 0"));
  EXPECT_NE(machine_of("boot-1 pid:[1] net:[2] ipc:[3] 0"), machine_of("boot-2 pid:[1] net:[2] ipc:[3] 0"));
  EXPECT_EQ(machine_of("unknown 77"), "");
}

}  // namespace
}  // namespace unshard::comm
