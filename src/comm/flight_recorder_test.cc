#include "unshard/comm/flight_recorder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

namespace unshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(FlightRecorder, KeepsTheLastRecordsOldestFirst) {
  FlightRecorder recorder(4);
  for (int i = 0; i < 10; ++i) recorder.end(recorder.begin("all_gather", "p" + std::to_string(i), i * 8, i));
  const auto records = recorder.snapshot();
  ASSERT_EQ(records.size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(records[i].sequence, 6 + i);
    EXPECT_EQ(records[i].detail, "p" + std::to_string(6 + i));
    EXPECT_EQ(records[i].bytes, static_cast<std::int64_t>(6 + i) * 8);
  }
}

TEST(FlightRecorder, ARunningCallHasNoEnd) {
  FlightRecorder recorder;
  recorder.begin("reduce_scatter", "bucket 3", 1024, 5);
  EXPECT_LT(recorder.snapshot().at(0).ended_s, 0);
  EXPECT_THAT(recorder.to_text(), AllOf(HasSubstr("step 5 reduce_scatter 'bucket 3' 1024 bytes"), HasSubstr("running")));
}

TEST(FlightRecorder, TheEndOfAnOverwrittenRecordIsIgnored) {
  FlightRecorder recorder(2);
  const auto first = recorder.begin("a", "", 0, 0);
  recorder.begin("b", "", 0, 0);
  recorder.begin("c", "", 0, 0);
  recorder.end(first);
  for (const auto& record : recorder.snapshot()) EXPECT_LT(record.ended_s, 0) << record.op;
}

TEST(FlightRecorder, LongTextsAreCut) {
  FlightRecorder recorder;
  recorder.begin(std::string(100, 'o'), std::string(1000, 'd'), 0, 0);
  const auto record = recorder.snapshot().at(0);
  EXPECT_EQ(record.op, std::string(23, 'o'));
  EXPECT_EQ(record.detail, std::string(103, 'd'));
}

TEST(FlightRecorder, ThreadsMayRecordAtTheSameTime) {
  FlightRecorder recorder(16);
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) recorder.end(recorder.begin("op", "x", 1, 1));
    });
  for (auto& thread : threads) thread.join();
  const auto records = recorder.snapshot();
  EXPECT_EQ(records.back().sequence, 2999u);
  for (const auto& record : records) EXPECT_GE(record.ended_s, record.started_s);
}

}  // namespace
}  // namespace unshard
