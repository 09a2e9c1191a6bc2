#include "checkpoint/commit.h"

#include <signal.h>
#include <sys/wait.h>

#include <chrono>
#include <random>
#include <thread>

#include "checkpoint/keep.h"
#include "checkpoint/testing.h"
#include "core/soak.h"

namespace unshard::checkpoint::testing {
namespace {

namespace fs = std::filesystem;
using unshard::testing::soak;

CommitOptions with_latest(int keep = 0) {
  CommitOptions options;
  options.write_latest = true;
  options.keep = keep;
  return options;
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

TEST(Commit, LeavesTheFilesAndNothingElse) {
  Folder folder;
  write_sample(folder / "a", 2, with_latest());
  write_sample(folder / "b", 3, with_latest());
  write_sample(folder / "b", 2, with_latest());  // in its place
  EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"a", "b", "latest"}));
  EXPECT_EQ(names_in(folder / "b"), (std::vector<std::string>{"manifest.json", "rank_0.safetensors", "rank_1.safetensors"}));
  EXPECT_EQ(latest_tag(folder.path()), "b");
  verify(folder / "a");
  verify(folder / "b");
}

TEST(Commit, KeepsTheNewestAndWhatLatestNames) {
  Folder folder;
  fs::create_directories(folder / "mine");
  put(folder / "mine/notes", "not a checkpoint");
  fs::create_directories(folder / "x.partial");
  put(folder / "x.partial/rank_0.safetensors", "");
  for (const char* tag : {"a", "b", "c", "d"}) {
    write_sample(folder / tag, 1, with_latest(2));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // files have times of their own
  }
  EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"c", "d", "latest", "mine"}));
  put(folder / "latest", "c\n");
  write_sample(folder / "e", 1, [] {
    auto options = with_latest(1);
    options.write_latest = false;
    return options;
  }());
  EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"c", "e", "latest", "mine"}));
}

TEST(Commit, ARankThatFailsOrDoesntComeLeavesTheFormerSave) {
  Folder folder;
  write_sample(folder / "a", 1);
  const auto former = contents_of(folder / "a/manifest.json");
  const auto expect_error = [&](const CommitOptions& options, const std::string& part) {
    Manifest manifest;
    manifest.contents.world_size = 2;
    try {
      commit(folder / "a", manifest, options);
      FAIL() << part;
    } catch (const CheckpointError& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
    EXPECT_FALSE(fs::exists(folder / "a.partial"));
    EXPECT_EQ(contents_of(folder / "a/manifest.json"), former);
  };
  CommitOptions options;
  options.limit = std::chrono::duration<double>(0.05);
  begin_save(folder / "a");
  expect_error(options, "rank 0's file isn't there after 0.05 s");
  begin_save(folder / "a");
  report_file(folder / "a", 0, {}, "disk \xff full");
  expect_error(options, "rank 0 failed: disk");
  begin_save(folder / "a");
  options.lost = [] { return "rank 1 is gone (killed)"; };
  expect_error(options, "rank 1 is gone");
  begin_save(folder / "a");
  report_file(folder / "a", 0, {100, std::nullopt, {}}, {});
  put(folder / "a.partial/rank_0.safetensors", "short");
  expect_error({}, "has 5 bytes here, rank 0 wrote 100");
}

// A writer is killed at random moments, again and again over what the last one left: `latest` always names a complete state, and never
// goes back.
TEST(Commit, KilledAtAnyMomentTheNewestCompleteStateVerifies) {
  Folder folder;
  write_sample(folder / "step0", 2, with_latest());
  std::mt19937 random(5);
  int seen = 0, kills = 0;
  for (int round = 0; round < 15 * soak(); ++round) {
    const auto child = ::fork();
    if (child == 0) {
      for (int step = seen + 1;; ++step) {  // both new names and the one in use
        write_sample(folder / cat("step", step % 3), 2, with_latest(2));
        put(folder / "last", std::to_string(step));
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 60000) * (seen == 0 ? 1 + round : 1));  // a slow machine's first step
    ::kill(child, SIGKILL);
    int status = 0;
    ::waitpid(child, &status, 0);
    kills += WIFSIGNALED(status) ? 1 : 0;
    const auto tag = latest_tag(folder.path());
    ASSERT_FALSE(tag.empty());
    EXPECT_NO_THROW(verify(present_of(folder / tag))) << tag << " in round " << round;
    if (const auto last = contents_of(folder / "last"); !last.empty()) {
      EXPECT_GE(std::stoi(last), seen);
      seen = std::stoi(last);
    }
  }
  EXPECT_EQ(kills, 15 * soak());
  EXPECT_GT(seen, 0);
}

}  // namespace
}  // namespace unshard::checkpoint::testing
