#include "unshard/offload/async_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "offload/transfers.h"
#include "unshard/core/error.h"

namespace unshard::offload {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class Folder {
 public:
  explicit Folder(const std::string& below = "/tmp") {
    path_ = below + "/unshard_offload_XXXXXX";
    if (!::mkdtemp(path_.data())) throw std::runtime_error("mkdtemp");
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string random_bytes(std::size_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::string bytes(size, '\0');
  for (auto& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

void put(const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }
std::string get(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

bool has_uring() {
  try {
    AsyncQueue queue({.method = Method::uring});
    return true;
  } catch (const FileError&) {
    return false;
  }
}

std::vector<Method> methods() { return has_uring() ? std::vector{Method::uring, Method::threads} : std::vector{Method::threads}; }

std::string message(const std::function<void()>& f) {
  try {
    f();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing was thrown";
}

// Any offset, length and alignment of memory, on a disk and in memory, directly and not, by either method.
TEST(AsyncQueue, RandomReadsAndWritesAreThoseOfAPlainFile) {
  constexpr std::int64_t kFile = 300'000;
  for (const char* place : {"/tmp", "/dev/shm"}) {
    if (!std::filesystem::is_directory(place)) continue;
    for (const Method method : methods()) {
      for (const bool direct : {true, false}) {
        Folder folder(place);
        auto wanted = random_bytes(kFile, 1);
        put(folder / "file", wanted);
        AsyncFile file(folder / "file", Access::write, direct);
        AsyncQueue queue({.method = method, .queue_depth = 3, .piece_bytes = 8192, .threads = 3});
        std::mt19937 random(2);
        AlignedBuffer memory(kFile + kBlock);
        for (int round = 0; round < 150; ++round) {
          const bool aligned = round % 2 == 0;
          std::int64_t offset = random() % kFile, bytes = random() % (kFile - offset + 1);
          if (aligned) offset = offset / kBlock * kBlock;
          auto* at = reinterpret_cast<char*>(memory.data()) + (aligned ? 0 : random() % kBlock);
          if (random() % 2 == 0) {
            const auto bytes_of = random_bytes(static_cast<std::size_t>(bytes), random());
            std::copy(bytes_of.begin(), bytes_of.end(), at);
            wanted.replace(static_cast<std::size_t>(offset), bytes_of.size(), bytes_of);
            queue.wait(queue.write(file, offset, bytes, at));
          } else {
            queue.wait(queue.read(file, offset, bytes, at));
            ASSERT_EQ(std::string_view(at, static_cast<std::size_t>(bytes)), std::string_view(wanted).substr(offset, bytes));
          }
        }
        file.sync();
        EXPECT_EQ(get(folder / "file"), wanted) << place << ", " << queue.describe() << ", " << file.describe();
      }
    }
  }
}

TEST(AsyncQueue, ManyRequestsOfManyThreadsAreAllDone) {
  for (const Method method : methods()) {
    Folder folder;
    const auto wanted = random_bytes(1 << 20, 3);
    put(folder / "file", wanted);
    const AsyncFile file(folder / "file", Access::read);
    AsyncQueue queue({.method = method, .queue_depth = 4, .piece_bytes = 4096});
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    for (unsigned t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        std::mt19937 random(t);
        std::vector<std::string> buffers(40);
        std::vector<std::pair<AsyncQueue::Ticket, std::size_t>> tickets;
        for (auto& buffer : buffers) {
          const std::size_t offset = random() % (1 << 19), size = random() % 20'000;
          buffer.resize(size);
          tickets.emplace_back(queue.read(file, static_cast<std::int64_t>(offset), static_cast<std::int64_t>(size), buffer.data()), offset);
        }
        for (std::size_t i = buffers.size(); i-- > 0;) {  // in another order than asked for
          queue.wait(tickets[i].first);
          wrong += buffers[i] != wanted.substr(tickets[i].second, buffers[i].size());
        }
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(wrong, 0) << queue.describe();
  }
}

TEST(AsyncQueue, AFileThatEndsBeforeIsAnErrorWithItsOffset) {
  for (const Method method : methods()) {
    Folder folder;
    put(folder / "short", random_bytes(10'000, 1));
    const AsyncFile file(folder / "short", Access::read);
    AsyncQueue queue({.method = method});
    AlignedBuffer memory(16384);
    const auto ticket = queue.read(file, 0, 16384, memory.data());
    EXPECT_THAT(message([&] { queue.wait(ticket); }), AllOf(HasSubstr("short"), HasSubstr("ends before 6384 bytes at offset 10000")));
    EXPECT_THAT(message([&] { queue.wait(ticket); }), HasSubstr("there is no ticket"));
    queue.wait(queue.read(file, 0, 10'000, memory.data()));  // the queue goes on
  }
}

TEST(AsyncQueue, AFullDiskNamesFileAndReason) {
  for (const Method method : methods()) {
    AsyncQueue queue({.method = method});
    const AsyncFile full("/dev/full", Access::write, false);
    const auto bytes = random_bytes(100, 1);
    const auto ticket = queue.write(full, 0, 100, bytes.data());
    EXPECT_THAT(message([&] { queue.wait(ticket); }), AllOf(HasSubstr("/dev/full"), HasSubstr("offset 0"), HasSubstr("No space left")));
  }
  Folder folder;
  if (::mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=1m") != 0) GTEST_SKIP() << "mounting a small tmpfs needs root";
  {
    const AsyncFile file(folder / "file", Access::write);
    EXPECT_THAT(message([&] { file.reserve(3 << 20); }), AllOf(HasSubstr("3145728 bytes"), HasSubstr("MB are free")));
    AsyncQueue queue;
    AlignedBuffer memory(3 << 20);
    static_cast<void>(queue.write(file, 0, 3 << 20, memory.data()));
    EXPECT_THAT(message([&] { queue.wait_all(); }), HasSubstr("No space left"));
  }
  ::umount(folder.path().c_str());
}

TEST(AsyncQueue, WrongUseIsRefusedBeforeAnythingIsDone) {
  Folder folder;
  put(folder / "file", "abc");
  AsyncFile file(folder / "file", Access::read);
  AsyncQueue queue;
  char byte = 0;
  EXPECT_THAT(message([&] { queue.write(file, 0, 1, &byte); }), HasSubstr("opened for reading"));
  EXPECT_THAT(message([&] { queue.read(file, -1, 1, &byte); }), HasSubstr("negative"));
  EXPECT_THAT(message([&] { queue.wait(99); }), HasSubstr("there is no ticket 99"));
  const auto ticket = queue.read(file, 2, 1, &byte);
  file.close();
  EXPECT_THAT(message([&] { queue.read(file, 0, 1, &byte); }), HasSubstr("closed"));
  EXPECT_THAT(message([&] { file.sync(); }), HasSubstr("closed"));
  queue.wait(ticket);  // what was under way isn't disturbed
  EXPECT_EQ(byte, 'c');
  EXPECT_THAT(message([&] { AsyncFile(folder / "none", Access::read); }), AllOf(HasSubstr("none"), HasSubstr("No such file")));
  EXPECT_THAT(message([&] { AsyncFile(folder.path(), Access::read); }), HasSubstr("a folder"));
  EXPECT_THAT(message([&] { AsyncQueue({.queue_depth = 0}); }), HasSubstr("queue_depth is 0"));
  EXPECT_THAT(message([&] { AsyncQueue({.piece_bytes = 5000}); }), HasSubstr("piece_bytes is 5000"));
}

// The destructor returns when the system has let go of the buffers: what is in them then doesn't change any more.
TEST(AsyncQueue, IsDestroyedAndCancelledWithRequestsUnderWay) {
  Folder folder;
  put(folder / "file", std::string(8 << 20, 'x'));
  const AsyncFile file(folder / "file", Access::read);
  for (const Method method : methods()) {
    for (int round = 0; round < 5; ++round) {
      AlignedBuffer memory(8 << 20);
      {
        AsyncQueue queue({.method = method, .queue_depth = 2, .piece_bytes = 65536, .threads = 2});
        static_cast<void>(queue.read(file, 0, 8 << 20, memory.data()));
        if (round > 0) std::this_thread::sleep_for(std::chrono::microseconds(200 * round));
      }
      std::fill_n(memory.data(), memory.bytes(), std::byte{0});
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      EXPECT_TRUE(std::all_of(memory.data(), memory.data() + memory.bytes(), [](auto byte) { return byte == std::byte{0}; }));
    }
    AlignedBuffer memory(8 << 20);
    AsyncQueue queue({.method = method, .queue_depth = 1, .piece_bytes = 4096, .threads = 1});
    const auto ticket = queue.read(file, 0, 8 << 20, memory.data());
    queue.cancel_all();
    EXPECT_TRUE(queue.done(ticket));
    EXPECT_THAT(message([&] { queue.wait(ticket); }), HasSubstr("cancelled"));
    queue.wait(queue.read(file, 0, 8 << 20, memory.data()));
  }
}

/// Carries pieces out one by one, with the results that a test wants.
class FaultyCarrier : public Carrier {
 public:
  using Result = std::function<std::int64_t(const Transfer&)>;  ///< bytes that go over at most, or minus errno
  FaultyCarrier(Transfers& transfers, Result result) : transfers_(transfers), result_(std::move(result)) {}
  void wake() override {
    while (auto piece = transfers_.take()) {
      auto allowed = result_(*piece);
      if (allowed > 0) {
        const auto size = static_cast<std::size_t>(std::min(allowed, piece->bytes));
        allowed =
            piece->write ? ::pwrite(piece->fd, piece->buffer, size, piece->offset) : ::pread(piece->fd, piece->buffer, size, piece->offset);
      }
      transfers_.finish(std::move(*piece), allowed);
    }
  }
  std::string describe() const override { return "faults"; }

 private:
  Transfers& transfers_;
  Result result_;
};

AsyncQueue faulty(FaultyCarrier::Result result) {
  auto impl = std::make_unique<AsyncQueue::Impl>();
  impl->options.piece_bytes = 8192;
  impl->carrier = std::make_unique<FaultyCarrier>(impl->transfers, std::move(result));
  return AsyncQueue(std::move(impl));
}

TEST(AsyncQueue, ShortTransfersAndInterruptionsGoOnWhereTheyStopped) {
  Folder folder;
  const auto wanted = random_bytes(50'000, 4);
  put(folder / "file", wanted);
  const AsyncFile file(folder / "file", Access::write);
  std::mt19937 random(5);
  auto queue = faulty([&](const Transfer& piece) -> std::int64_t {
    switch (random() % 4) {
      case 0:
        return -EINTR;
      case 1:
        return -EAGAIN;
      default:
        return piece.fd == file.held()->direct ? 4096 * (1 + random() % 2) : 1 + random() % 5000;
    }
  });
  AlignedBuffer memory(1 << 16);
  queue.wait(queue.read(file, 0, 50'000, memory.data()));
  EXPECT_EQ(std::string_view(reinterpret_cast<char*>(memory.data()), 50'000), wanted);
  const auto other = random_bytes(50'000, 6);
  std::copy_n(reinterpret_cast<const std::byte*>(other.data()), other.size(), memory.data());
  queue.wait(queue.write(file, 0, 50'000, memory.data()));
  EXPECT_EQ(get(folder / "file"), other);
}

TEST(AsyncQueue, AFileSystemThatTakesTheFlagButNoDirectTransferIsReadThroughTheCache) {
  Folder folder;
  const auto wanted = random_bytes(50'000, 4);
  put(folder / "file", wanted);
  const AsyncFile file(folder / "file", Access::read);
  if (file.held()->direct < 0) GTEST_SKIP() << file.describe();
  auto queue = faulty([&](const Transfer& piece) -> std::int64_t { return piece.fd == file.held()->direct ? -EINVAL : piece.bytes; });
  AlignedBuffer memory(1 << 16);
  queue.wait(queue.read(file, 0, 50'000, memory.data()));
  EXPECT_EQ(std::string_view(reinterpret_cast<char*>(memory.data()), 50'000), wanted);
  EXPECT_THAT(file.describe(), HasSubstr("through the page cache"));
}

TEST(AsyncQueue, AnErrorNamesThePieceAndDropsTheRestOfItsRequestAlone) {
  Folder folder;
  put(folder / "file", std::string(100'000, 'x'));
  const AsyncFile file(folder / "file", Access::read);
  int calls = 0;
  auto queue = faulty([&](const Transfer& piece) -> std::int64_t { return ++calls == 3 ? -EIO : piece.bytes; });
  AlignedBuffer memory(1 << 17);
  const auto bad = queue.read(file, 0, 100'000, memory.data());
  const auto good = queue.read(file, 0, 8192, memory.data());
  EXPECT_EQ(calls, 4);  // 13 pieces of the first would be needed
  EXPECT_THAT(message([&] { queue.wait(bad); }),
              AllOf(HasSubstr("can't read 8192 bytes at offset 16384"), HasSubstr("Input/output error"), HasSubstr("/file")));
  queue.wait(good);
}

/// In a child process in which io_uring isn't permitted, as in many containers.
int without_uring(const std::function<bool()>& f) {
  const pid_t child = ::fork();
  if (child == 0) {
    sock_filter filter[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
                            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    const sock_fprog program = {4, filter};
    if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) ::_exit(77);
    ::_exit(f() ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(AsyncQueue, ThreadsServeWhereIoUringIsForbiddenAndSayWhy) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer starts no threads in a forked child";
#endif
  Folder folder;
  put(folder / "file", random_bytes(30'000, 8));
  const auto result = without_uring([&] {
    AsyncQueue queue;
    const AsyncFile file(folder / "file", Access::read);
    AlignedBuffer memory(1 << 15);
    queue.wait(queue.read(file, 0, 30'000, memory.data()));
    const bool refused = message([] { AsyncQueue({.method = Method::uring}); }).find("not permitted") != std::string::npos;
    const auto text = queue.describe();
    return refused && text.find("4 threads") == 0 && text.find("not permitted") != std::string::npos &&
           std::string_view(reinterpret_cast<char*>(memory.data()), 30'000) == random_bytes(30'000, 8);
  });
  if (result == 77) GTEST_SKIP() << "seccomp isn't there";
  EXPECT_EQ(result, 0);
}

}  // namespace
}  // namespace unshard::offload
