#include "checkpoint/direct_writer.h"

#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <random>

#include "checkpoint/testing.h"

namespace unshard::checkpoint::testing {
namespace {

std::string random_bytes(std::size_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::string bytes(size, '\0');
  for (auto& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

// Sizes around blocks and buffers, in pieces of any length, on a disk and in memory, directly and not.
TEST(DirectWriter, WritesEveryLengthExactly) {
  for (const char* place : {"/tmp", "/dev/shm"}) {
    if (!std::filesystem::is_directory(place)) continue;
    Folder folder(place);
    for (const bool direct : {true, false}) {
      WriterOptions options;
      options.buffer_bytes = 8192;
      options.direct = direct;
      for (const std::size_t size : {0, 1, 511, 4095, 4096, 4097, 8191, 8192, 8193, 16384, 40000}) {
        const auto bytes = random_bytes(size, static_cast<unsigned>(size));
        DirectWriter writer(folder / "file", static_cast<std::int64_t>(size), options);
        std::mt19937 random(7);
        for (std::size_t at = 0; at < size;) {
          const auto part = std::min<std::size_t>(size - at, 1 + random() % 9000);
          writer.append(bytes.data() + at, part);
          at += part;
        }
        EXPECT_EQ(writer.finish(), static_cast<std::int64_t>(size));
        EXPECT_EQ(contents_of(folder / "file"), bytes) << place << ", direct " << direct << ", " << size << " bytes";
      }
    }
  }
}

TEST(DirectWriter, AFileThatCantBeMadeIsAnErrorByName) {
  Folder folder;
  try {
    DirectWriter writer(folder / "no/such/file", 10);
    FAIL();
  } catch (const CheckpointError& error) {
    EXPECT_NE(std::string(error.what()).find("no/such/file"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("No such file"), std::string::npos) << error.what();
  }
}

TEST(DirectWriter, AFullDiskIsFoundBeforeAnythingIsWrittenAndWhileWriting) {
  Folder folder;
  if (::mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=1m") != 0) GTEST_SKIP() << "mounting a small tmpfs needs root";
  struct Unmount {
    std::string path;
    ~Unmount() { ::umount2(path.c_str(), MNT_DETACH); }
  } unmount{folder.path()};
  const auto expect_no_space = [&](std::int64_t expected) {
    try {
      DirectWriter writer(folder / "file", expected, {.buffer_bytes = 65536, .direct = true});
      const auto bytes = random_bytes(4 << 20, 1);
      writer.append(bytes.data(), bytes.size());
      writer.finish();
      FAIL() << "4 MiB in a disk of 1 MiB";
    } catch (const CheckpointError& error) {
      EXPECT_NE(std::string(error.what()).find("no space for its"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find(folder / "file"), std::string::npos);
    }
    std::filesystem::remove(folder / "file");
  };
  expect_no_space(4 << 20);
  expect_no_space(0);  // a size that wasn't known
}

// The system writes up to the limit, then fails: a short write first.
TEST(DirectWriter, AShortWriteIsContinuedOrAnError) {
  Folder folder;
  const auto child = ::fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{10000, 10000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      DirectWriter writer(folder / "file", 0, {.buffer_bytes = 8192, .direct = true});
      const auto bytes = random_bytes(20000, 1);
      writer.append(bytes.data(), bytes.size());
      writer.finish();
    } catch (const CheckpointError& error) {
      ::_exit(std::string(error.what()).find("File too large") != std::string::npos ? 0 : 2);
    }
    ::_exit(1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(contents_of(folder / "file"), random_bytes(20000, 1).substr(0, 10000));
}

}  // namespace
}  // namespace unshard::checkpoint::testing
