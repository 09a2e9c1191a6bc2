// The recorder: nothing while off, everything while on, in bounded memory, from any thread; the file is JSON after every write.
#include "unshard/core/timeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>
#include <vector>

#include "core/event_queue.h"
#include "unshard/core/error.h"

namespace unshard {
namespace {

using Json = nlohmann::json;
using ::testing::HasSubstr;

class Recorded : public ::testing::Test {
 protected:
  Recorded() { std::filesystem::remove_all(folder_); }
  ~Recorded() override { std::filesystem::remove_all(folder_); }

  TimelineOptions options(std::size_t capacity = 1 << 10) const {
    TimelineOptions options;
    options.directory = folder_ + "/made/on/demand";
    options.host = "a \"quoted\" host";
    options.run = "run 1";
    options.rank = 3;
    options.world_size = 4;
    options.capacity = capacity;
    return options;
  }
  std::string path() const { return options().directory + "/timeline.rank3.json"; }
  Json file() const { return Json::parse(std::ifstream(path())); }
  std::vector<Json> events(std::string_view phase) const {
    std::vector<Json> found;
    const auto document = file();
    for (const auto& event : document["traceEvents"])
      if (event["ph"] == phase) found.push_back(event);
    return found;
  }
  std::vector<Json> spans() const { return events("X"); }

  const std::string folder_ = ::testing::TempDir() + "unshard_timeline_" + std::to_string(::getpid());
};

TEST_F(Recorded, NothingWhileOff) {
  Timeline timeline;
  { const TimelineSpan span(timeline, Lane::compute, "before it is opened"); }
  timeline.count("memory", 1);
  timeline.end_step(0);
  timeline.flush();
  EXPECT_FALSE(timeline.is_on());
  EXPECT_FALSE(std::filesystem::exists(folder_));
  timeline.open(options());
  timeline.close();
  { const TimelineSpan span(timeline, Lane::compute, "after it was closed"); }
  EXPECT_THAT(spans(), ::testing::IsEmpty());
  EXPECT_THAT(events("C"), ::testing::IsEmpty());
}

TEST_F(Recorded, SpansNestAndSayWhatTheyWereAbout) {
  Timeline timeline;
  timeline.open(options());
  {
    const TimelineSpan outer(timeline, Lane::compute, "forward");
    { const TimelineSpan inner(timeline, Lane::gather, "wait", "blocks.0.up.weight", 4096); }
    timeline.count("gathered parameters", 77);
  }
  timeline.close();
  const auto found = spans();
  ASSERT_EQ(found.size(), 2U);  // in the order they ended
  const auto &inner = found[0], &outer = found[1];
  EXPECT_EQ(inner["name"], "wait");
  EXPECT_EQ(inner["cat"], "gather");
  EXPECT_EQ(inner["pid"], 3);
  EXPECT_EQ(inner["args"], Json::parse(R"({"bytes": 4096, "of": "blocks.0.up.weight"})"));
  EXPECT_EQ(outer["args"], Json::object());
  const double outer_begin = outer["ts"], outer_end = outer_begin + outer["dur"].get<double>();
  const double inner_begin = inner["ts"], inner_end = inner_begin + inner["dur"].get<double>();
  EXPECT_LE(outer_begin, inner_begin);
  EXPECT_GE(outer_end + 0.001, inner_end);  // written in thousandths of microseconds, each rounded down
  const auto counters = events("C");
  ASSERT_EQ(counters.size(), 1U);
  EXPECT_EQ(counters[0]["args"]["bytes"], 77);
}

TEST_F(Recorded, TheFileSaysWhoseItIs) {
  Timeline timeline;
  timeline.open(options());
  timeline.set_clock({1000, -250, 30});
  timeline.set_clock({2000, -260, 20});
  timeline.flush();
  EXPECT_EQ(file()["recording"]["closed"], false);
  timeline.close();
  const auto facts = file()["otherData"];
  EXPECT_EQ(facts["rank"], 3);
  EXPECT_EQ(facts["world_size"], 4);
  EXPECT_EQ(facts["host"], "a \"quoted\" host");
  EXPECT_EQ(facts["run"], "run 1");
  EXPECT_EQ(file()["recording"], Json::parse(R"({"closed": true, "dropped": 0})"));
  const auto about = events("M");
  ASSERT_EQ(about.size(), 3U);
  EXPECT_EQ(about[0]["args"]["reading"], Json::parse("[1000, -250, 30]"));
  EXPECT_EQ(about[1]["args"]["reading"], Json::parse("[2000, -260, 20]"));
  EXPECT_EQ(about[2]["args"]["name"], "rank 3 (a \"quoted\" host)");
}

TEST_F(Recorded, FromManyThreadsWhileTheFileIsWritten) {
  constexpr int kThreads = 4, kSpans = 5000;
  Timeline timeline;
  timeline.open(options(1 << 16));
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&timeline] {
      for (int i = 0; i < kSpans; ++i) const TimelineSpan span(timeline, Lane::prefetch, "fetch ahead", "p", i);
    });
  for (int i = 0; i < 20; ++i) {
    timeline.flush();
    EXPECT_NO_THROW(file());
  }
  for (auto& thread : threads) thread.join();
  timeline.close();
  std::map<std::int64_t, std::vector<std::int64_t>> by_thread;
  for (const auto& span : spans()) by_thread[span["tid"]].push_back(span["args"]["bytes"]);
  ASSERT_EQ(by_thread.size(), static_cast<std::size_t>(kThreads));
  std::vector<std::int64_t> all(kSpans);
  for (int i = 0; i < kSpans; ++i) all[static_cast<std::size_t>(i)] = i;
  for (const auto& [thread, numbers] : by_thread) EXPECT_EQ(numbers, all);  // each thread's in its own order, none lost, none twice
}

TEST_F(Recorded, MemoryIsBoundedAndLossesAreCounted) {
  Timeline timeline;
  timeline.open(options(64));
  for (int i = 0; i < 1000; ++i) const TimelineSpan span(timeline, Lane::collective, "all_gather", {}, i);
  timeline.flush();
  EXPECT_EQ(spans().size(), 64U);
  EXPECT_EQ(file()["recording"]["dropped"], 936);
  { const TimelineSpan span(timeline, Lane::collective, "after the loss"); }
  timeline.close();
  EXPECT_EQ(spans().back()["name"], "after the loss");
  timeline.open(options(64));  // another recording, which has lost nothing
  timeline.close();
  EXPECT_EQ(file()["recording"]["dropped"], 0);
}

TEST_F(Recorded, AStepBeginsWhereTheFileHasBeenWritten) {
  using std::chrono::milliseconds;
  Timeline timeline;
  timeline.open(options());
  timeline.begin_first_step();
  for (int step = 7; step < 10; ++step) {
    std::this_thread::sleep_for(milliseconds(1));
    timeline.end_step(step);
    std::this_thread::sleep_for(milliseconds(20));  // for clocks and the file
    timeline.begin_step();
  }
  timeline.close();
  const auto found = spans();
  ASSERT_EQ(found.size(), 3U);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(found[i]["args"]["step"], 7 + i);
  for (std::size_t i = 1; i < 3; ++i) {
    const double before = found[i - 1]["ts"].get<double>() + found[i - 1]["dur"].get<double>();
    EXPECT_GE(found[i]["ts"].get<double>(), before + 20'000);
    EXPECT_GE(found[i]["dur"].get<double>(), 1000);
  }
}

TEST_F(Recorded, LongRunsAreThinnedOut) {
  Timeline timeline;
  timeline.open(options(1 << 12));
  int recorded = 0, flushes = 0;
  for (int step = 0; step < 5000; ++step) {
    if (timeline.is_on()) {
      ++recorded;
      EXPECT_EQ(step % (step < 100 ? 1 : step < 1000 ? 10 : 100), 0) << step;
    }
    timeline.end_step(step);
    flushes += timeline.is_flush_step();
    timeline.begin_step();
  }
  timeline.close();
  EXPECT_EQ(recorded, 100 + 90 + 40);
  EXPECT_EQ(spans().size(), 230U);
  EXPECT_EQ(flushes, 1 + 23);
}

// Ranks read their clocks together after such steps: one whose disk is full must come too.
TEST_F(Recorded, ARankWhoseFileCantBeWrittenKeepsStepWithTheOthers) {
  Timeline healthy, full;
  healthy.open(options());
  auto other = options();
  other.name = "full";
  std::filesystem::create_symlink("/dev/full", other.directory + "/timeline.rank3.full.json");
  full.open(other);
  int flushes = 0;
  for (int step = 0; step < 300; ++step) {
    for (auto* timeline : {&healthy, &full}) timeline->end_step(step);
    ASSERT_EQ(full.is_flush_step(), healthy.is_flush_step()) << step;
    if (healthy.is_flush_step()) {
      ++flushes;
      for (auto* timeline : {&healthy, &full}) {
        timeline->set_clock({step, 0, 0});
        timeline->flush();
      }
    }
    for (auto* timeline : {&healthy, &full}) timeline->begin_step();
    EXPECT_TRUE(full.is_open());
    EXPECT_EQ(full.is_on(), false) << step;
  }
  EXPECT_EQ(flushes, 1 + 12);
  full.close();
  EXPECT_FALSE(full.is_open());
  full.open(options());  // where there is room
  EXPECT_TRUE(full.is_on());
}

// A limit on the size of files is as a full disk is: the file stays what it was.
TEST_F(Recorded, AFailedWriteLeavesTheFileAsItWas) {
  Timeline timeline;
  timeline.open(options());
  { const TimelineSpan span(timeline, Lane::compute, "before"); }
  timeline.flush();
  const auto before = file();
  const auto size = std::filesystem::file_size(path());
  for (int i = 0; i < 500; ++i) const TimelineSpan span(timeline, Lane::compute, "after");
  rlimit old{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{size + 5000, old.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  timeline.flush();
  timeline.close();
  ::setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(std::filesystem::file_size(path()), size);
  EXPECT_EQ(file(), before);
}

TEST_F(Recorded, AThreadThatComputesIsNoReductionThread) {
  Timeline timeline;
  timeline.open(options());
  const auto record = [&](std::initializer_list<Lane> lanes) {
    std::thread([&] {
      for (const auto lane : lanes) const TimelineSpan span(timeline, lane, "work");
    }).join();
    timeline.flush();
  };
  record({Lane::bucket, Lane::gather});
  record({Lane::bucket, Lane::collective});
  record({Lane::reduce, Lane::bucket});
  timeline.close();
  std::multiset<std::string> names;
  for (const auto& event : events("M"))
    if (event["name"] == "thread_name") names.insert(event["args"]["name"]);
  EXPECT_THAT(names, ::testing::ElementsAre("autograd", "autograd", "reduction"));
}

TEST_F(Recorded, ANameThatCantBePartOfAFilesNameIsRefused) {
  Timeline timeline;
  for (const auto* name : {"a/b", "../x", "first.second", "with space"}) {
    auto wrong = options();
    wrong.name = name;
    EXPECT_THROW(timeline.open(wrong), std::invalid_argument) << name;
  }
  EXPECT_FALSE(timeline.is_open());
}

TEST_F(Recorded, ATextThatIsTooLongKeepsItsEnd) {
  Timeline timeline;
  timeline.open(options());
  std::string name = "\xC3\xA4";
  for (int i = 0; i < 60; ++i) name += "\xC3\xA4";  // two bytes a letter
  name += ".weight";
  { const TimelineSpan span(timeline, Lane::gather, "wait", name); }
  timeline.close();
  const std::string shown = spans().front()["args"]["of"];  // parsed, so it is UTF-8
  EXPECT_TRUE(shown.starts_with("..\xC3\xA4")) << shown;
  EXPECT_TRUE(shown.ends_with("\xC3\xA4.weight")) << shown;
  EXPECT_LE(shown.size(), 71U);
}

TEST_F(Recorded, AFolderThatCantBeMadeIsNamed) {
  std::filesystem::create_directories(folder_);
  std::ofstream(folder_ + "/file") << "here";
  auto wrong = options();
  wrong.directory = folder_ + "/file/below";
  Timeline timeline;
  try {
    timeline.open(wrong);
    FAIL() << "opened";
  } catch (const std::invalid_argument& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank 3 can't write"));
    EXPECT_THAT(error.what(), HasSubstr("/file/below"));
  }
  EXPECT_FALSE(timeline.is_on());
  timeline.open(options());  // another folder will do
  EXPECT_TRUE(timeline.is_on());
}

TEST(EventQueue, KeepsOrderAcrossManyTurns) {
  EventQueue<int> queue(8);
  int next = 0, expected = 0;
  for (int round = 0; round < 1000; ++round) {
    for (int i = 0; i < round % 9; ++i) queue.push([&](int& event) { event = next++; });
    queue.drain([&](const int& event) { EXPECT_EQ(event, expected++); });
  }
  EXPECT_EQ(queue.dropped(), 0);
  EXPECT_EQ(expected, next);
}

TEST(EventQueue, CapacityIsAPowerOfTwo) { EXPECT_THROW(EventQueue<int>(12), std::invalid_argument); }

}  // namespace
}  // namespace unshard
