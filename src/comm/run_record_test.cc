#include "unshard/comm/run_record.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "comm/tcp_links.h"
#include "unshard/comm/communicator.h"
#include "unshard/core/error.h"

namespace unshard {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using ::testing::HasSubstr;
using Json = nlohmann::json;

class RunRecordTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "unshard_record_XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::shared_ptr<RunRecord> start(int rank = 0, int world = 1) const {
    RunRecordOptions options;
    options.rank = rank;
    options.world_size = world;
    options.directory = folder_.string();
    return RunRecord::start(options);
  }
  fs::path file(int rank) const { return folder_ / ("rank" + std::to_string(rank) + ".json"); }
  Json read(int rank) const {
    std::ifstream in(file(rank));
    return Json::parse(in);
  }
  bool appears(int rank, std::chrono::milliseconds limit = 5s) const {
    const auto end = std::chrono::steady_clock::now() + limit;
    while (!fs::exists(file(rank)) && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(5ms);
    return fs::exists(file(rank));
  }

  fs::path folder_;
};

/// Two ranks in one process, each with a record of its own.
struct Pair {
  std::shared_ptr<RunRecord> records[2];
  std::vector<std::shared_ptr<Communicator>> comms;
};

TEST_F(RunRecordTest, HasTheLastCollectivesOfEveryCommunicator) {
  auto record = start();
  CommOptions options;
  options.record = record;
  auto comm = single_process_communicator(options);
  comm->set_step(7);
  comm->set_phase(Phase::backward, "blocks.1.up.weight");
  auto tensor = at::full({4}, 1.0f), output = at::empty({4});
  comm->all_gather(output, tensor, "first");
  comm->all_reduce(tensor, ReduceOp::sum, "second");
  ASSERT_EQ(record->write("asked"), file(0).string());
  const Json json = read(0);
  EXPECT_EQ(json["format"], 1);
  EXPECT_EQ(json["rank"], 0);
  EXPECT_EQ(json["pid"], ::getpid());
  EXPECT_EQ(json["reason"], "asked");
  const Json& group = json["groups"].at(0);
  EXPECT_EQ(group["name"], "world 0");
  EXPECT_EQ(group["step"], 7);
  EXPECT_EQ(group["phase"]["name"], "backward");
  EXPECT_EQ(group["phase"]["detail"], "blocks.1.up.weight");
  ASSERT_EQ(group["entries"].size(), 2u);
  EXPECT_EQ(group["entries"][1]["op"], "all_reduce");
  EXPECT_EQ(group["entries"][1]["detail"], "second");
  EXPECT_EQ(group["entries"][1]["index"], 1);
  EXPECT_FALSE(group["entries"][1]["end"].is_null());
  EXPECT_EQ(group["counts"]["all_gather"]["calls"], 1);
}

TEST_F(RunRecordTest, KeepsWhatAClosedCommunicatorDid) {
  auto record = start();
  CommOptions options;
  options.record = record;
  {
    auto tensor = at::full({4}, 1.0f);
    single_process_communicator(options)->all_reduce(tensor, ReduceOp::sum, "x");
  }
  record->write("asked");
  const Json group = read(0)["groups"].at(0);
  EXPECT_TRUE(group["closed"]);
  EXPECT_EQ(group["entries"].size(), 1u);
}

TEST_F(RunRecordTest, ATimeOutWritesBothRanksFiles) {
  CommOptions options;
  options.timeout = 1s;
  options.record = start(0, 2);
  auto other = start(1, 2);
  auto comms = in_process_communicators(2, options);
  EXPECT_THROW(comms[0]->barrier("alone"), CommError);
  ASSERT_TRUE(appears(0, 0s));  // before the error reaches the caller
  const Json json = read(0);
  EXPECT_EQ(json["reason"], "time-out");
  EXPECT_EQ(json["failure"]["kind"], "time-out");
  EXPECT_THAT(json["failure"]["text"].get<std::string>(), HasSubstr("barrier 'alone'"));
  const auto waits = [](const Json& group) { return !group["entries"].empty() && group["entries"].back()["end"].is_null(); };
  EXPECT_EQ(std::count_if(json["groups"].begin(), json["groups"].end(), waits), 1);  // the other rank's group has this record too
  EXPECT_TRUE(appears(1, 0s)) << "the failing rank waits a moment for the others";
  EXPECT_EQ(read(1)["reason"], "another rank failed");
  other->fail("[comm.barrier] rank 0 is gone");
  EXPECT_EQ(read(1)["reason"], "another rank failed") << "where it was then matters, not how it ended";
}

TEST_F(RunRecordTest, OnlyTheFirstFailureCounts) {
  auto record = start();
  record->fail("[comm.barrier] rank 1 (pid 5) is gone");
  record->fail("[comm.barrier] this group can't be used any more");
  const Json json = read(0);
  EXPECT_EQ(json["failure"]["kind"], "lost rank");
  EXPECT_EQ(json["failure"]["text"], "[comm.barrier] rank 1 (pid 5) is gone");
}

TEST_F(RunRecordTest, AWaitOfAGroupThatIsClosedIsTakenBackFromTheOthers) {
  auto record = start();
  std::string heard;
  const auto hear = [&](std::string_view group, std::string_view place) { heard = std::string(group) + ": " + std::string(place); };
  const auto nothing = [] { return GroupRecord{}; };
  const auto failed = record->add(nothing), other = record->add(nothing, {}, hear);
  record->waits(failed, "world 0", "[comm.barrier]");
  EXPECT_EQ(heard, "world 0: [comm.barrier]");
  record->remove(failed);
  EXPECT_EQ(heard, ": ");
  record->remove(other);
}

TEST_F(RunRecordTest, WithoutAFolderNothingIsWritten) {
  const auto before = fs::current_path();
  fs::current_path(folder_);
  {
    auto record = RunRecord::start({});
    record->fail("[comm.barrier] no progress for 3 s");
    EXPECT_EQ(record->write("exception", "ValueError: no"), "");
  }
  EXPECT_TRUE(fs::is_empty(folder_));
  fs::current_path(before);
}

// The others fail because of it, a moment later.
TEST_F(RunRecordTest, WhatWasWrittenOfAnExceptionStays) {
  auto raises = start(0, 2), other = start(1, 2);
  raises->raise("RuntimeError: my data is broken");
  other->fail("[comm.barrier] rank 0 left the group");
  std::this_thread::sleep_for(600ms);
  raises->fail("[comm.barrier] rank 1 is gone");
  const Json json = read(0);
  EXPECT_EQ(json["reason"], "exception");
  EXPECT_EQ(json["text"], "RuntimeError: my data is broken");
}

TEST_F(RunRecordTest, AnEarlierRunsFileIsKeptUnderAnotherName) {
  std::ofstream(file(0)) << "old";
  auto record = start();
  EXPECT_FALSE(fs::exists(file(0)));
  EXPECT_TRUE(fs::exists(folder_ / "rank0.former.json"));
}

std::atomic<int> handled{0};

// Handlers of others before and after ours; a main thread that never returns to any loop.
TEST_F(RunRecordTest, SigUsr1WritesWhileTheMainThreadIsBusyAndOthersHandlersRunToo) {
  struct sigaction mine {
  }, before{};
  mine.sa_handler = [](int) { ++handled; };
  ASSERT_EQ(::sigaction(SIGUSR1, &mine, &before), 0);
  auto record = start();
  handled = 0;
  ::kill(::getpid(), SIGUSR1);
  while (!appears(0, 0s)) {
  }
  EXPECT_EQ(read(0)["reason"], "asked");
  EXPECT_EQ(handled, 1);

  ASSERT_EQ(::sigaction(SIGUSR1, &mine, nullptr), 0);  // the user's comes later, and ours is gone
  fs::remove(file(0));
  std::this_thread::sleep_for(600ms);
  ::kill(::getpid(), SIGUSR1);
  EXPECT_TRUE(appears(0));
  EXPECT_EQ(handled, 2);
}

// The main thread's error may end the process at once, while another thread is writing down what came first.
TEST_F(RunRecordTest, ASecondThreadsFailureReturnsOnlyWhenTheFirstIsWritten) {
  std::atomic<bool> writing{false};
  RunRecordOptions options;
  options.directory = folder_.string();
  options.position = [&] {
    writing = true;
    std::this_thread::sleep_for(300ms);
    return std::string();
  };
  auto record = RunRecord::start(options);
  std::thread first([&] { record->fail("[comm.barrier] rank 1 is gone"); });
  while (!writing) std::this_thread::yield();
  record->fail("[comm.all_gather 'x'] rank 1 is gone");
  EXPECT_TRUE(fs::exists(file(0)) && fs::exists(folder_ / "failure"));
  EXPECT_EQ(read(0)["failure"]["text"], "[comm.barrier] rank 1 is gone");
  first.join();
}

TEST_F(RunRecordTest, AForkedChildDoesNotSpeakForItsParent) {
  auto record = start();
  const pid_t child = ::fork();
  if (child == 0) {
    record->write("exception");
    record->fail("[comm] x is gone");
    ::kill(::getpid(), SIGUSR1);
    ::_exit(fs::exists(folder_ / "rank0.json") ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  std::this_thread::sleep_for(300ms);
  EXPECT_FALSE(fs::exists(file(0)));
}

TEST_F(RunRecordTest, TheEndIsWrittenOnceAndOnlyIfAsked) {
  start()->end();
  EXPECT_FALSE(fs::exists(file(0)));
  RunRecordOptions options;
  options.directory = folder_.string();
  options.at_end = true;
  RunRecord::start(options)->end();
  EXPECT_EQ(read(0)["reason"], "end of the run");
}

TEST(KindOfFailure, IsToldFromTheText) {
  EXPECT_EQ(kind_of_failure("[comm.barrier] no progress for 3 s: rank 0: idle"), "time-out");
  EXPECT_EQ(kind_of_failure("[comm.all_gather 'x'] a peer failed or timed out: [buffer.cc:1] Timed out waiting 2000ms for send"),
            "time-out");
  EXPECT_EQ(kind_of_failure("[comm.all_gather 'x'] a peer failed or timed out: Connection closed by peer"), "lost rank");
  EXPECT_EQ(kind_of_failure("[comm.barrier] rank 1 (pid 7) is gone, last seen in backward"), "lost rank");
  EXPECT_EQ(kind_of_failure("[comm.check_all_in] the ranks are in different calls: rank 0 is in a"), "disagreement");
  EXPECT_EQ(kind_of_failure("[comm.subgroup] what"), "error");
}

TEST(TcpLinks, KnowWhatWasSentToWhom) {
  CommOptions options;
  options.share_memory = false;
  auto comms = in_process_communicators(2, options);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      auto tensor = at::full({1 << 20}, 1.0f), output = at::empty({2 << 20});
      comms[static_cast<std::size_t>(rank)]->all_gather(output, tensor);
    });
  for (auto& thread : threads) thread.join();
  const auto links = comm::tcp_links(/*loopback_too=*/true);
  ASSERT_FALSE(links.empty());
  EXPECT_GE(links[0].bytes_sent, 8 << 20);  // both ends are in this process
  EXPECT_GT(links[0].send_bytes_per_s, 1e6);
  for (const auto& link : comm::tcp_links()) EXPECT_NE(link.peer, "127.0.0.1");
}

}  // namespace
}  // namespace unshard
