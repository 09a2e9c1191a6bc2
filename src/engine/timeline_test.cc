// The engine's part of the timeline: all ranks open it or none does, and go on together whatever becomes of one rank's file.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "engine_testing.h"

namespace unshard {
namespace {

class EngineTimeline : public ::testing::Test {
 protected:
  EngineTimeline() { std::filesystem::create_directories(folder_); }
  ~EngineTimeline() override { std::filesystem::remove_all(folder_); }

  std::string path(int rank) const { return folder_ + "/timeline.rank" + std::to_string(rank) + ".json"; }
  nlohmann::json file(int rank) const { return nlohmann::json::parse(std::ifstream(path(rank))); }
  static Config config(const std::string& folder) {
    testing::RunOptions run;
    run.stage = 3;
    auto config = testing::config_of(run, 2);
    config.unshard.timeline = folder;
    return config;
  }
  static void train(Engine& engine, testing::TinyModel& model, int rank, int steps) {
    for (int step = 0; step < steps; ++step) {
      engine.begin_forward();
      const auto loss = model.loss(testing::tokens_of(rank, step));
      engine.end_forward();
      engine.backward(loss);
      engine.step();
    }
  }
  static std::size_t count(const nlohmann::json& file, std::string_view name) {
    std::size_t found = 0;
    for (const auto& event : file["traceEvents"]) found += event["name"] == name;
    return found;
  }

  const std::string folder_ = ::testing::TempDir() + "unshard_engine_timeline_" + std::to_string(::getpid());
};

TEST_F(EngineTimeline, AFullDiskOnOneRankEndsItsRecordingOnly) {
  std::filesystem::create_symlink("/dev/full", path(1));
  testing::run_hosts({1, 1}, {}, [&](int rank, Communicator& comm) {
    testing::TinyModel model;
    Engine engine(model.named(), config(folder_), testing::share(comm));
    train(engine, model, rank, 12);
    EXPECT_EQ(comm.timeline().is_on(), rank == 0);
    engine.destroy();
  });
  const auto written = file(0);
  EXPECT_EQ(count(written, "clock"), 3U);  // at the start, after the first step and the tenth
  EXPECT_EQ(written["recording"]["closed"], true);
  std::int64_t most = 0;  // what is held of the other host's pieces counts
  for (const auto& event : written["traceEvents"])
    if (event["name"] == "gathered parameters") most = std::max(most, event["args"]["bytes"].get<std::int64_t>());
  EXPECT_GT(most, 0);
}

TEST_F(EngineTimeline, WhatOneRankCantOpenIsOpenNowhere) {
  std::ofstream(folder_ + "/file") << "here";
  testing::run_hosts({1, 1}, {}, [&](int rank, Communicator& comm) {
    const auto attempt = [&](const std::string& folder) {
      testing::TinyModel model;
      Engine engine(model.named(), config(folder), testing::share(comm));
      train(engine, model, rank, 2);
      engine.destroy();
    };
    const auto wrong = rank == 1 ? folder_ + "/file/below" : folder_;
    if (rank == 1)
      EXPECT_THROW(attempt(wrong), std::invalid_argument);
    else
      EXPECT_THROW(attempt(wrong), CommError);
    EXPECT_FALSE(comm.timeline().is_open());
    attempt(folder_);
  });
  for (const int rank : {0, 1}) EXPECT_EQ(count(file(rank), "forward"), 2U);
}

TEST_F(EngineTimeline, EnginesOfOneGroupHaveTheFileOfWhoeverOpenedIt) {
  testing::run_ranks(2, [&](int rank, Communicator& comm) {
    testing::TinyModel first_model, second_model;
    Engine first(first_model.named(), config(folder_), testing::share(comm));
    Engine second(second_model.named(), config(folder_), testing::share(comm));
    EXPECT_TRUE(first.writes_timeline());
    EXPECT_FALSE(second.writes_timeline());
    train(first, first_model, rank, 1);
    train(second, second_model, rank, 1);
    second.destroy();
    EXPECT_TRUE(comm.timeline().is_open());
    first.destroy();
    EXPECT_FALSE(comm.timeline().is_open());
  });
  for (const int rank : {0, 1}) EXPECT_EQ(count(file(rank), "forward"), 2U);
}

TEST_F(EngineTimeline, ATimelineThatIsOpenOnSomeRanksOnlyIsAnError) {
  testing::run_ranks(2, [&](int rank, Communicator& comm) {
    testing::TinyModel model, other;
    Engine engine(model.named(), config(folder_), testing::share(comm));
    if (rank == 0) engine.close_timeline();
    try {
      const Engine second(other.named(), config(folder_), testing::share(comm));
      ADD_FAILURE() << "made";
    } catch (const CommError& error) {
      EXPECT_NE(std::string(error.what()).find("timeline of rank 1 is still open and that of rank 0 isn't"), std::string::npos)
          << error.what();
    }
    engine.destroy();
  });
}

}  // namespace
}  // namespace unshard
