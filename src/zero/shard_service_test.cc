#include "zero/shard_service.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstring>
#include <exception>
#include <latch>
#include <random>
#include <thread>

#include "unshard/comm/communicator.h"
#include "unshard/core/error.h"
#include "zero/shard_server.h"
#include "zero/shard_service_internal.h"

namespace unshard {
namespace {

using Clock = std::chrono::steady_clock;
using testing::HasSubstr;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// Parameters of one rank: parameter id has `numel` bytes in all; byte i of it is value(id, i).
struct Model {
  std::vector<std::size_t> sizes;
  int world_size;

  static std::byte value(int id, std::size_t i) { return static_cast<std::byte>((i * 31 + i / 253 + id * 7 + 1) & 0xff); }
  std::size_t shard_bytes(int id) const { return (sizes[id] + world_size - 1) / world_size; }
  std::size_t begin(int id, int rank) const { return std::min(sizes[id], shard_bytes(id) * rank); }
  std::vector<std::vector<std::byte>> pieces(int rank) const {
    std::vector<std::vector<std::byte>> all;
    for (int id = 0; id < static_cast<int>(sizes.size()); ++id) {
      auto& piece = all.emplace_back();
      for (std::size_t i = begin(id, rank); i < begin(id, rank + 1); ++i) piece.push_back(value(id, i));
    }
    return all;
  }
};

/// Ranks as threads: an all-gather of strings between them.
class ThreadExchange {
 public:
  explicit ThreadExchange(int world_size) : values_(world_size), barrier_(world_size) {}
  std::vector<std::string> operator()(int rank, const std::string& mine) {
    values_[rank] = mine;
    barrier_.arrive_and_wait();
    auto all = values_;
    barrier_.arrive_and_wait();
    return all;
  }
  void wait() { barrier_.arrive_and_wait(); }

 private:
  std::vector<std::string> values_;
  std::barrier<> barrier_;
};

void run_ranks(int world_size, const std::function<void(int, ThreadExchange&)>& body) {
  ThreadExchange exchange(world_size);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < world_size; ++rank) threads.emplace_back([&, rank] { body(rank, exchange); });
}

std::unique_ptr<ShardService> start(int rank, int world_size, ThreadExchange& exchange, ShardService::Lookup lookup,
                                    const ShardWait& wait = {}) {
  return start_shard_service(
      rank, world_size, [&](const std::string& mine) { return exchange(rank, mine); }, std::move(lookup), wait);
}

/// A whole parameter to fill: own piece in place, the rest poisoned.
struct Whole {
  Whole(const Model& model, int id, int rank) : bytes(model.shard_bytes(id) * model.world_size, std::byte{0xEE}) {
    for (std::size_t i = model.begin(id, rank); i < model.begin(id, rank + 1); ++i) bytes[i] = Model::value(id, i);
    request = {.id = id, .whole = bytes.data(), .shard_bytes = model.shard_bytes(id), .numel_bytes = model.sizes[id]};
  }
  void expect_complete(const Model& model) const {
    for (std::size_t i = 0; i < model.sizes[request.id]; ++i)
      ASSERT_EQ(bytes[i], Model::value(request.id, i)) << "byte " << i << " of parameter " << request.id;
    for (std::size_t i = model.sizes[request.id]; i < bytes.size(); ++i) ASSERT_EQ(bytes[i], std::byte{0xEE}) << "padding was written";
  }
  std::vector<std::byte> bytes;
  ShardService::Request request;
};

class Worlds : public testing::TestWithParam<int> {};

TEST_P(Worlds, AFetchBringsEveryOtherPieceAndCountsItsBytes) {
  const int world = GetParam();
  const Model model{{1000, 7, 1, 0, 65536 * 3 + 5, 2}, world};  // 1, 0 and 2 bytes: some ranks hold nothing of them
  run_ranks(world, [&](int rank, ThreadExchange& exchange) {
    const auto pieces = model.pieces(rank);
    auto service = start(rank, world, exchange, [&](int id) { return std::span(pieces[id]); });
    std::vector<Whole> wholes;
    std::int64_t expected = 0;
    for (int id = 0; id < static_cast<int>(model.sizes.size()); ++id) {
      wholes.emplace_back(model, id, rank);
      expected += static_cast<std::int64_t>(model.sizes[id] - pieces[id].size());
    }
    std::vector<ShardService::Request> requests;
    for (auto& whole : wholes) whole.request.whole = whole.bytes.data(), requests.push_back(whole.request);
    service->fetch(requests);
    for (const auto& whole : wholes) whole.expect_complete(model);
    EXPECT_EQ(service->bytes_received(), expected);
    service->fetch({});
    EXPECT_EQ(service->bytes_received(), expected);
    exchange.wait();
  });
}

TEST_P(Worlds, ThreadsFetchDifferentParametersAtOnceWithoutAgreement) {
  const int world = GetParam();
  Model model{{}, world};
  for (int id = 0; id < 20; ++id) model.sizes.push_back(1 + 997 * id * id);
  run_ranks(world, [&](int rank, ThreadExchange& exchange) {
    const auto pieces = model.pieces(rank);
    auto service = start(rank, world, exchange, [&](int id) { return std::span(pieces[id]); });
    {
      std::vector<std::jthread> threads;
      for (int t = 0; t < 3; ++t) {
        threads.emplace_back([&, t] {
          std::mt19937 random(rank * 10 + t);
          for (int i = 0; i < 40; ++i) {
            Whole first(model, random() % 20, rank), second(model, random() % 20, rank);
            service->fetch({first.request, second.request});
            first.expect_complete(model);
            second.expect_complete(model);
          }
        });
      }
    }
    exchange.wait();
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, Worlds, testing::Values(1, 2, 3, 4));

TEST(ShardService, StartsOverACommunicatorAndOutlivesIt) {
  const Model model{{5000, 3}, 2};
  CommOptions unshared;
  unshared.share_memory = false;
  auto comms = in_process_communicators(2, unshared);
  run_ranks(2, [&](int rank, ThreadExchange& exchange) {
    const auto pieces = model.pieces(rank);
    auto service = ShardService::start(*comms[rank], [&](int id) { return std::span(pieces[id]); });
    exchange.wait();
    comms[rank].reset();
    for (int id = 0; id < 2; ++id) {
      Whole whole(model, id, rank);
      service->fetch({whole.request});
      whole.expect_complete(model);
    }
    exchange.wait();
  });
}

TEST(ShardService, ARankThatOnlyServesTakesNoPart) {
  const Model model{{5000}, 2};
  run_ranks(2, [&](int rank, ThreadExchange& exchange) {
    const auto pieces = model.pieces(rank);
    auto service = start(rank, 2, exchange, [&](int id) { return std::span(pieces[id]); });
    for (int i = 0; rank == 0 && i < 100; ++i) {
      Whole whole(model, 0, rank);
      service->fetch({whole.request});
      whole.expect_complete(model);
    }
    exchange.wait();
    EXPECT_EQ(service->bytes_received(), rank == 0 ? 100 * 2500 : 0);
  });
}

TEST(ShardService, PiecesAboveTwoGiBArrive) {
  constexpr std::size_t kPiece = (std::size_t{1} << 31) + 4097, kWindow = std::size_t{32} << 20;
  static_assert((std::size_t{1} << 31) % kWindow == 0);
  const auto reserve = [](std::size_t bytes) {
    return static_cast<std::byte*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  };
  run_ranks(2, [&](int rank, ThreadExchange& exchange) {
    // Rank 1 owns the big piece: untouched pages (zero) with marks. Rank 0 reads it to memory whose first 2 GiB are one window over and
    // over.
    const std::size_t mapped = rank == 0 ? 2 * kPiece : kPiece;
    std::byte* memory = reserve(mapped);
    ASSERT_NE(memory, MAP_FAILED);
    const std::size_t marks[] = {kPiece - 4097, kPiece - 4000, kPiece - 1};
    if (rank == 1)
      for (const std::size_t mark : marks) memory[mark] = std::byte{0x5A};
    auto service = start(rank, 2, exchange, [&](int) { return std::span<const std::byte>(memory, rank == 1 ? kPiece : 0); });
    if (rank == 0) {
      const int file = memfd_create("window", MFD_CLOEXEC);
      ASSERT_EQ(ftruncate(file, kWindow), 0);
      const std::size_t start_at = (kPiece + 4095) / 4096 * 4096;  // pages wholly inside the destination
      for (std::size_t at = start_at; at + kWindow <= 2 * kPiece - kWindow; at += kWindow)
        ASSERT_NE(mmap(memory + at, kWindow, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0), MAP_FAILED);
      close(file);
      // numel_bytes lets rank 0 own [0, kPiece) and rank 1 the rest.
      service->fetch({{.id = 0, .whole = memory, .shard_bytes = kPiece, .numel_bytes = 2 * kPiece}});
      for (const std::size_t mark : marks) EXPECT_EQ(memory[kPiece + mark], std::byte{0x5A});
      EXPECT_EQ(memory[2 * kPiece - 2], std::byte{0});
      EXPECT_EQ(service->bytes_received(), static_cast<std::int64_t>(kPiece));
    }
    exchange.wait();
    service.reset();
    munmap(memory, mapped);
  });
}

TEST(ShardService, DisagreementAboutALayoutIsNamedAndTheServiceGoesOn) {
  const Model model{{1000, 2000}, 2};
  run_ranks(2, [&](int rank, ThreadExchange& exchange) {
    const auto pieces = model.pieces(rank);
    auto service = start(rank, 2, exchange, [&](int id) -> std::span<const std::byte> {
      require(id < 2, "no parameter ", id);
      return pieces[id];
    });
    if (rank == 0) {
      std::vector<std::byte> whole(4000);
      const auto message = [&](const ShardService::Request& request) -> std::string {
        try {
          service->fetch({request});
        } catch (const CommError& error) {
          return error.what();
        }
        return "nothing was thrown";
      };
      EXPECT_THAT(message({.id = 1, .whole = whole.data(), .shard_bytes = 999, .numel_bytes = 1998}),
                  testing::AllOf(HasSubstr("rank 1"), HasSubstr("parameter 1"), HasSubstr("999"), HasSubstr("1000")));
      EXPECT_THAT(message({.id = 9, .whole = whole.data(), .shard_bytes = 10, .numel_bytes = 20}), HasSubstr("no parameter 9"));
      EXPECT_THROW(service->fetch({{.id = 0, .whole = whole.data(), .shard_bytes = 10, .numel_bytes = 21}}), std::invalid_argument);
      Whole good(model, 0, rank);
      service->fetch({good.request});
      good.expect_complete(model);
    }
    exchange.wait();
  });
}

TEST(ShardService, APeerThatShutDownIsNamedAndShutdownNeedsNoOrder) {
  const Model model{{3000}, 3};
  for (int first = 0; first < 3; ++first) {
    run_ranks(3, [&](int rank, ThreadExchange& exchange) {
      const auto pieces = model.pieces(rank);
      auto service = start(rank, 3, exchange, [&](int id) { return std::span(pieces[id]); });
      if (rank == first) service.reset();
      exchange.wait();
      Whole whole(model, 0, rank);
      for (int attempt = 0; rank != first && attempt < 2; ++attempt) {
        const auto start_time = Clock::now();
        try {
          service->fetch({whole.request});
          ADD_FAILURE() << "the fetch should have failed";
        } catch (const CommError& error) {
          EXPECT_THAT(error.what(), HasSubstr(cat("rank ", first)));
        }
        EXPECT_LT(seconds_since(start_time), 1);
      }
      exchange.wait();
    });
  }
}

TEST(ShardService, AStalledPeerEndsTheFetchAfterTheTimeOut) {
  run_ranks(2, [&](int rank, ThreadExchange& exchange) {
    std::latch release(1);
    const std::vector<std::byte> piece(10);
    auto service = start(rank, 2, exchange,
                         [&](int) -> std::span<const std::byte> {
                           if (rank == 1) release.wait();  // a serving thread that hangs
                           return piece;
                         },
                         {.timeout = std::chrono::duration<double>(0.3)});
    if (rank == 0) {
      std::vector<std::byte> whole(20);
      try {
        service->fetch({{.id = 4, .whole = whole.data(), .shard_bytes = 10, .numel_bytes = 20}});
        ADD_FAILURE() << "the fetch should have failed";
      } catch (const CommError& error) {
        EXPECT_THAT(error.what(), testing::AllOf(HasSubstr("rank 1"), HasSubstr("parameter 4"), HasSubstr("0.3 s")));
      }
    }
    exchange.wait();
    release.count_down();
  });
}

TEST(ShardService, AnInterruptLeavesTheWaitAndTheNextFetchIsRight) {
  const Model model{{4000}, 2};
  struct Interrupted {};
  run_ranks(2, [&](int rank, ThreadExchange& exchange) {
    const auto pieces = model.pieces(rank);
    std::atomic<bool> hold{true}, interrupt{rank == 0};
    std::atomic<bool> started{false};
    auto service = start(rank, 2, exchange,
                         [&](int id) {
                           while (rank == 1 && hold) std::this_thread::yield();
                           return std::span<const std::byte>(pieces[id]);
                         },
                         {.timeout = std::chrono::seconds(20), .interrupt_check = [&] {
                            if (started && interrupt) throw Interrupted();
                          }});
    Whole whole(model, 0, rank);
    started = true;
    if (rank == 0) {
      EXPECT_THROW(service->fetch({whole.request}), Interrupted);
    }
    exchange.wait();
    hold = interrupt = false;
    exchange.wait();
    if (rank == 0) service->fetch({whole.request}), whole.expect_complete(model);
    exchange.wait();
  });
}

TEST(ShardService, AStrangerOnThePortGetsNothing) {
  auto listener = net::listen(true);
  const int port = listener.port;
  wire::Secret secret{};
  secret[3] = 7;
  const std::vector<std::byte> piece(10);
  ShardServer server(
      0, std::move(listener), secret, [&](int) { return std::span(piece); }, std::chrono::seconds(5));
  std::string error;
  for (const bool right_rank : {true, false}) {
    auto socket = net::connect("127.0.0.1", port, std::chrono::seconds(5), &error);
    ASSERT_TRUE(socket) << error;
    wire::Hello hello{.secret = {}, .from = 1, .to = right_rank ? 0 : 1};
    if (!right_rank) hello.secret[3] = 7;  // right secret, wrong rank; and the other way round
    ASSERT_EQ(::send(socket.get(), &hello, sizeof hello, MSG_NOSIGNAL), static_cast<ssize_t>(sizeof hello));
    char byte;
    ssize_t got;
    while ((got = ::recv(socket.get(), &byte, 1, 0)) < 0 && errno == EAGAIN) std::this_thread::yield();
    EXPECT_LE(got, 0);
  }
}

/// Two processes over a socket pair; the child is rank 1 and serves until it is killed.
class ChildRank {
 public:
  ChildRank(const Model& model, bool leave_heir) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) throw std::runtime_error("socketpair");
    pid_ = fork();
    channel_ = net::Descriptor(pair[pid_ == 0 ? 1 : 0]);
    ::close(pair[pid_ == 0 ? 0 : 1]);
    if (pid_ != 0) return;
    const auto pieces = model.pieces(1);
    auto service = start_shard_service(1, 2, exchange(1), [&](int id) { return std::span(pieces[id]); }, {});
    if (leave_heir && fork() == 0) {  // like a data loader's worker: holds copies of the connections
      char byte;
      (void)!::read(channel_.get(), &byte, 1);  // until the parent closes its end
      ::_exit(0);
    }
    for (;;) ::pause();
  }
  ~ChildRank() { kill(), channel_.reset(); }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  HostGroup::Exchange exchange(int rank) const {
    return [fd = channel_.get(), rank](const std::string& mine) {
      const std::size_t size = mine.size();
      std::size_t other_size = 0;
      const auto message = std::string(reinterpret_cast<const char*>(&size), sizeof size) + mine;
      EXPECT_EQ(::send(fd, message.data(), message.size(), MSG_NOSIGNAL), static_cast<ssize_t>(message.size()));
      EXPECT_EQ(::recv(fd, &other_size, sizeof other_size, MSG_WAITALL), static_cast<ssize_t>(sizeof other_size));
      std::string other(other_size, '\0');  // a read of nothing would wait for something
      if (!other.empty() && ::recv(fd, other.data(), other_size, MSG_WAITALL) != static_cast<ssize_t>(other_size))
        throw std::runtime_error("the other rank's string is cut off");
      return rank == 0 ? std::vector<std::string>{mine, other} : std::vector<std::string>{other, mine};
    };
  }

 private:
  pid_t pid_ = 0;
  net::Descriptor channel_;
};

class KilledPeer : public testing::TestWithParam<bool> {};

TEST_P(KilledPeer, IsNamedWithinASecondEvenWhenAForkedChildHoldsItsConnections) {
  const Model model{{8 << 20}, 2};
  ChildRank child(model, GetParam());
  const auto pieces = model.pieces(0);
  auto service = start_shard_service(0, 2, child.exchange(0), [&](int id) { return std::span(pieces[id]); }, {});
  Whole whole(model, 0, 0);
  service->fetch({whole.request});
  whole.expect_complete(model);
  std::atomic<Clock::duration::rep> killed_at{0};
  std::jthread killer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    killed_at = Clock::now().time_since_epoch().count();
    child.kill();
  });
  try {
    for (;;) service->fetch({whole.request});  // until it dies under us
  } catch (const CommError& error) {
    const auto noticed = Clock::now().time_since_epoch() - Clock::duration(killed_at);
    EXPECT_LT(std::chrono::duration<double>(noticed).count(), 1);
    EXPECT_THAT(error.what(), testing::AllOf(HasSubstr("rank 1"), HasSubstr("gone"), HasSubstr("on rank 0")));
  }
  EXPECT_THROW(service->fetch({whole.request}), CommError);
}

INSTANTIATE_TEST_SUITE_P(Heirs, KilledPeer, testing::Bool());

std::string error_of(const ShardPeer& peer, const ShardWait& wait) {
  try {
    (void)peer.connect({}, wait);
  } catch (const CommError& error) {
    return error.what();
  }
  return "no error";
}

TEST(ShardPeer, TheCureForAFirewallIsForRanksOfWhichNothingIsKnown) {
  auto listener = net::listen(true);
  const int port = listener.port;
  listener.socket.reset();  // nobody is there
  ShardPeer peer(0, 1, cat("shards1 its-network its-processes 1 ", port, " 127.0.0.1"));
  const ShardWait nothing_known, known{.ended = [] { return "rank 1 is gone (its process or its host ended)"; }};
  const auto firewall = HasSubstr("open the ports");
  EXPECT_THAT(error_of(peer, nothing_known), testing::AllOf(HasSubstr("rank 1 can't be reached"), firewall));
  EXPECT_THAT(error_of(peer, known), testing::AllOf(HasSubstr("rank 1 is gone"), testing::Not(firewall)));
  peer.prefer(0);  // it was there
  EXPECT_THAT(error_of(peer, nothing_known), testing::AllOf(HasSubstr("rank 1 can't be reached any more"), testing::Not(firewall)));
}

TEST(ShardPeer, OneOfThisMachineThatEndedBeforeItWasReachedIsGone) {
  const pid_t pid = fork();
  if (pid == 0) ::_exit(0);
  ::waitpid(pid, nullptr, 0);
  auto listener = net::listen(true);
  const int port = listener.port;
  listener.socket.reset();
  const ShardPeer peer(0, 1, cat("shards1 ", net::network_identity(), " ", net::process_identity(), " ", pid, " ", port));
  EXPECT_THAT(error_of(peer, {}), testing::AllOf(HasSubstr(cat("rank 1 is gone: its process (pid ", pid, ") has ended")),
                                                 testing::Not(HasSubstr("open the ports"))));
}

// A peer whose host went without a word sends nothing and closes nothing: the watch on its host knows.
TEST(ShardService, AFetchFromARankThatIsKnownToBeGoneEndsAtOnce) {
  run_ranks(2, [&](int rank, ThreadExchange& exchange) {
    std::latch release(1);
    const std::vector<std::byte> piece(10);
    std::atomic<bool> gone{false};
    auto service = start(rank, 2, exchange,
                         [&](int) -> std::span<const std::byte> {
                           if (rank == 1) release.wait();
                           return piece;
                         },
                         {.timeout = std::chrono::seconds(20), .ended = [&] { return gone ? "rank 1 is gone (its host ended)" : ""; }});
    if (rank == 0) {
      gone = true;
      std::vector<std::byte> whole(20);
      const auto begin = Clock::now();
      try {
        service->fetch({{.id = 4, .whole = whole.data(), .shard_bytes = 10, .numel_bytes = 20}});
        ADD_FAILURE() << "the fetch should have failed";
      } catch (const CommError& error) {
        EXPECT_THAT(error.what(), testing::AllOf(HasSubstr("rank 1 is gone (its host ended)"), HasSubstr("parameter 4")));
      }
      EXPECT_LT(seconds_since(begin), 5);
    }
    exchange.wait();
    release.count_down();
  });
}

}  // namespace
}  // namespace unshard
