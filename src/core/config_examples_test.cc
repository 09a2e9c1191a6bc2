// The configurations that users were promised, and those of our own examples.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "core/config_test_util.h"
#include "unshard/core/config.h"
#include "unshard/core/error.h"

namespace unshard {
namespace {

using config_test::joined_notices;
using config_test::row;

// The four files every user was promised, as text; the same files are in examples/configs.
constexpr const char* kExample1 = R"({
  "train_batch_size": 32,
  "steps_per_print": 10,
  "optimizer": {
    "type": "Adam",
    "params": { "lr": 0.0001, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01 }
  },
  "zero_optimization": {
    "stage": 1,
    "allgather_partitions": true,
    "reduce_scatter": true,
    "allgather_bucket_size": 2e8,
    "overlap_comm": true
  },
  "fp16": { "enabled": true }
}
)";
constexpr const char* kExample2 = R"({
  "train_batch_size": 64,
  "gradient_accumulation_steps": 2,
  "zero_optimization": {
    "stage": 2,
    "allgather_partitions": true,
    "reduce_scatter": true,
    "allgather_bucket_size": 5e8,
    "overlap_comm": true,
    "reduce_bucket_size": 5e8
  },
  "fp16": { "enabled": true, "loss_scale": 0, "initial_scale_power": 16 }
}
)";
constexpr const char* kExample3 = R"({
  "zero_optimization": {
    "stage": 2,
    "offload_optimizer": { "device": "cpu", "pin_memory": true }
  },
  "fp16": { "enabled": true }
}
)";
constexpr const char* kExample4 = R"({
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": { "device": "cpu" },
    "offload_param": { "device": "cpu" },
    "overlap_comm": true,
    "contiguous_gradients": true,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto"
  }
}
)";

TEST(ConfigExamples, OneZero1) {
  const Config config = Config::from_json(kExample1, {.world_size = 2});
  EXPECT_EQ(config.zero.stage, 1);
  EXPECT_EQ(config.batch.micro_batch_size, 16);
  EXPECT_EQ(config.steps_per_print, 10);
  EXPECT_EQ(config.optimizer.type, "Adam");
  EXPECT_EQ(nlohmann::json::parse(config.optimizer.params_json),
            nlohmann::json::parse(R"({"lr":1e-4,"betas":[0.9,0.999],"eps":1e-8,"weight_decay":0.01})"));
  EXPECT_EQ(config.zero.allgather_bucket_numel, 200'000'000);
  EXPECT_TRUE(config.zero.overlap_comm && config.fp16.enabled);
  EXPECT_TRUE(config.notices().empty()) << joined_notices(config);
}

TEST(ConfigExamples, TwoZero2) {
  const Config config = Config::from_json(kExample2, {.world_size = 4});
  EXPECT_EQ(config.zero.stage, 2);
  EXPECT_EQ(config.batch.micro_batch_size, 8);
  EXPECT_EQ(config.batch.accumulation_steps, 2);
  EXPECT_EQ(config.fp16.loss_scale, 0);
  EXPECT_EQ(config.fp16.initial_scale_power, 16);
  EXPECT_EQ(config.optimizer.type, "");
}

TEST(ConfigExamples, ThreeZero2Offload) {
  const Config config = Config::from_json(kExample3, {.world_size = 2});
  EXPECT_EQ(config.zero.offload_optimizer.device, OffloadDevice::cpu);
  EXPECT_TRUE(config.zero.offload_optimizer.pin_memory);
  EXPECT_TRUE(config.batch.micro_batch_assumed);
  EXPECT_EQ(config.batch.train_batch_size, 2);
}

TEST(ConfigExamples, FourZero3Offload) {
  Config config = Config::from_json(kExample4, {.world_size = 2});
  EXPECT_EQ(config.zero.stage, 3);
  EXPECT_EQ(config.zero.offload_param.device, OffloadDevice::cpu);
  EXPECT_TRUE(config.zero.reduce_bucket_auto && config.zero.prefetch_bucket_auto && config.zero.persistence_threshold_auto);
  config.resolve_auto(256, 256 * 1024, 10'000'000);
  EXPECT_EQ(config.zero.reduce_bucket_numel, 65536);
  EXPECT_EQ(config.compute_dtype(), std::nullopt);
}

TEST(ConfigExamples, TheFilesLoadAndAreThePromisedTexts) {
  const auto directory = std::filesystem::path(__FILE__).parent_path() / "../../examples/configs";
  const std::pair<const char*, const char*> promised[] = {
      {"1-zero1.json", kExample1}, {"2-zero2.json", kExample2}, {"3-zero2-offload.json", kExample3}, {"4-zero3-offload.json", kExample4}};
  for (const auto& [name, text] : promised) {
    std::ifstream file(directory / name);
    std::ostringstream content;
    content << file.rdbuf();
    EXPECT_EQ(content.str(), text) << name;
    EXPECT_NO_THROW(Config::from_file((directory / name).string(), {.world_size = 2})) << name;
  }
  for (int stage = 0; stage < 4; ++stage) {
    const auto path = (directory / cat("zero", stage, ".json")).string();
    const Config config = Config::from_file(path, {.world_size = 2});
    EXPECT_EQ(config.zero.stage, stage);
    EXPECT_EQ(config.batch.train_batch_size, 16);
    EXPECT_EQ(config.gradient_clipping, 1.0);
    EXPECT_EQ(row(config, "zero_optimization.stage"), cat(stage, " <- ", path));
    EXPECT_TRUE(config.notices().empty()) << joined_notices(config);
  }
}

}  // namespace
}  // namespace unshard
