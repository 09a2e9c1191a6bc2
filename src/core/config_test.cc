// What Config does beyond single inputs: defaults, notices, "auto", the table, the JSON handed back.
#include "unshard/core/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <string_view>

#include "core/config_test_util.h"
#include "unshard/core/error.h"

namespace unshard {
namespace {

using config_test::error_of;
using config_test::joined_notices;
using config_test::row;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(Config, DepthIsBoundedNotTheStack) {
  EXPECT_THAT(error_of("{\"datastates_ckpt\": " + std::string(1'000'000, '[')), HasSubstr("nested deeper than 64"));
}

TEST(Config, ValuesThatAskForNothingAreAcceptedForKeysNotBuilt) {
  const Config config = Config::from_json(R"({
    "flops_profiler": {"enabled": false, "profile_step": 3}, "tensorboard": {"enabled": false, "output_path": "x"},
    "comms_logger": {"enabled": false},
    "sequence_parallel_size": 1, "tensor_parallel": {"autotp_size": 1}, "compile": {"deepcompile": false},
    "data_efficiency": {"enabled": false},
    "activation_checkpointing": {"partition_activations": false, "number_checkpoints": 4, "profile": false},
    "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1, "zero_quantized_weights": false, "zenflow": null},
    "aio": {"queue_depth": 16}, "pipeline": {"stages": "auto"}, "datastates_ckpt": false, "train_batch_size": 1})");
  EXPECT_EQ(config.zero.stage, 3);
  EXPECT_THAT(joined_notices(config), Not(HasSubstr("flops_profiler")));
}

TEST(Config, ClippingIsOffForUnshardAndOneForTheDropIn) {
  const Config own = Config::from_json("{}");
  EXPECT_EQ(own.gradient_clipping, 0);
  EXPECT_FALSE(own.gradient_clipping_defaulted);
  const Config drop_in = Config::from_json("{}", {.deepspeed_defaults = true});
  EXPECT_EQ(drop_in.gradient_clipping, 1.0);
  EXPECT_TRUE(drop_in.gradient_clipping_defaulted);
  EXPECT_THAT(joined_notices(drop_in), HasSubstr("gradient_clipping isn't configured"));
  EXPECT_EQ(row(drop_in, "gradient_clipping"), "1.0 <- default of DeepSpeed");
  const Config asked = Config::from_json(R"({"gradient_clipping": 0})", {.deepspeed_defaults = true});
  EXPECT_EQ(asked.gradient_clipping, 0);
  EXPECT_FALSE(asked.gradient_clipping_defaulted);
}

TEST(Config, AnAssumedMicroBatchIsSaidInOneLine) {
  for (const char* json : {"{}", R"({"gradient_accumulation_steps": 4})", R"({"train_micro_batch_size_per_gpu": "auto"})"}) {
    const Config config = Config::from_json(json, {.world_size = 2});
    EXPECT_TRUE(config.batch.micro_batch_assumed);
    EXPECT_EQ(config.batch.micro_batch_size, 1);
    EXPECT_EQ(config.batch.train_batch_size, 2 * config.batch.accumulation_steps);
    ASSERT_EQ(config.notices().size(), 1u) << joined_notices(config);
    EXPECT_THAT(config.notices()[0], HasSubstr("micro batch of 1"));
    EXPECT_THAT(config.notices()[0], Not(HasSubstr("\n")));
  }
  EXPECT_FALSE(Config::from_json(R"({"train_batch_size": 2})", {.world_size = 2}).batch.micro_batch_assumed);
}

TEST(Config, ComputeDtypeIsParamDtypeThenFp16ThenBf16) {
  EXPECT_EQ(Config::from_json("{}").compute_dtype(), std::nullopt);
  EXPECT_EQ(Config::from_json(R"({"fp16": {"enabled": true}})").compute_dtype(), c10::kHalf);
  EXPECT_EQ(Config::from_json(R"({"bf16": {"enabled": true}})").compute_dtype(), c10::kBFloat16);
  EXPECT_EQ(Config::from_json(R"({"bf16": {"enabled": true}, "data_types": {"param_dtype": "fp32"}})").compute_dtype(), c10::kFloat);
}

TEST(Config, AutoOutsideAFrameworkIsTheDefaultAndSaidSo) {
  const Config config = Config::from_json(R"({"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-6}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
    "zero_optimization": {"stage": 2, "allgather_bucket_size": "auto"}})");
  EXPECT_EQ(config.optimizer.params_json, R"({"eps":1e-06})");
  EXPECT_EQ(config.scheduler.params_json, "{}");
  EXPECT_EQ(config.zero.allgather_bucket_numel, 500'000'000);
  for (const char* key : {"optimizer.params.lr", "scheduler.params.warmup_max_lr", "zero_optimization.allgather_bucket_size"})
    EXPECT_THAT(joined_notices(config), HasSubstr(key));
}

TEST(Config, HintsWithoutEffectAreAcceptedAndSaidOnce) {
  const Config config =
      Config::from_json(R"({"train_batch_size": 1, "zero_optimization": {"stage": 2, "round_robin_gradients": true, "sub_group_size": 1e8},
    "zero_allow_untested_optimizer": true})");
  ASSERT_EQ(config.notices().size(), 1u);
  EXPECT_EQ(config.notices()[0], "accepted, without effect here: zero_optimization.round_robin_gradients = true");
}

TEST(Config, PathsWrittenAsKeysHaveNoEffectAndAreSaid) {
  const Config config = Config::from_json(R"({"train_batch_size": 1, "zero_optimization": {"stage": 3}, "zero_optimization.stage": 1,
    "zero_optimization.stage3_prefetch_bucket_size": 14.4, "optimizer.params.lr": 1})");
  EXPECT_EQ(config.zero.stage, 3);
  ASSERT_EQ(config.notices().size(), 1u);
  EXPECT_EQ(config.notices()[0],
            "without effect, as with DeepSpeed: zero_optimization.stage, zero_optimization.stage3_prefetch_bucket_size, "
            "optimizer.params.lr; a path isn't a key: nest them, {\"section\": {\"key\": value}}");
  EXPECT_THAT(error_of(R"({"zero_optimization.stag": 1})"), HasSubstr("unknown key zero_optimization.stag"));
  EXPECT_THAT(error_of(R"({"zero_optimization": {"offload_param.device": "cpu"}})"), HasSubstr("unknown key"));
}

TEST(Config, OffloadOfParametersBelowStageThreeIsDroppedAndSaid) {
  const Config config = Config::from_json(
      R"({"train_batch_size": 1, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}, "gradient_clipping": 0})");
  EXPECT_EQ(config.zero.offload_param.device, OffloadDevice::none);
  ASSERT_EQ(config.notices().size(), 1u);
  EXPECT_EQ(config.notices()[0],
            "zero_optimization.offload_param has no effect at zero_optimization.stage = 2: parameters are partitioned at stage 3 only");
}

constexpr const char* kAllAuto = R"({"train_batch_size": 4, "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto",
  "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto", "round_robin_gradients": false}})";

TEST(Config, AutoSizesFollowTheHiddenSize) {
  Config config = Config::from_json(kAllAuto);
  EXPECT_TRUE(config.zero.reduce_bucket_auto && config.zero.prefetch_bucket_auto && config.zero.persistence_threshold_auto);
  EXPECT_THAT(nlohmann::json::parse(config.to_json()).at("zero_optimization").at("reduce_bucket_size"), 500'000'000);
  EXPECT_EQ(row(config, "zero_optimization.reduce_bucket_size"), "500000000 <- auto: until the model is known");
  config.resolve_auto(1024, 50'000'000, 300'000'000);
  EXPECT_EQ(config.zero.reduce_bucket_numel, 1024 * 1024);
  EXPECT_EQ(config.zero.prefetch_bucket_numel, 943718);  // 0.9 * 1024^2, rounded down
  EXPECT_EQ(config.zero.param_persistence_threshold, 10240);
  EXPECT_EQ(row(config, "zero_optimization.prefetch_bucket_size"), "943718 <- model");
  const auto json = nlohmann::json::parse(config.to_json());
  EXPECT_EQ(json["zero_optimization"]["stage3_prefetch_bucket_size"], 943718);
  EXPECT_EQ(json["zero_optimization"]["stage3_param_persistence_threshold"], 10240);
}

TEST(Config, AutoSizesAreBoundedByTheModelAndEstimatedWithoutAHiddenSize) {
  Config config = Config::from_json(kAllAuto);
  config.resolve_auto(0, 64 * 64, 5000);
  EXPECT_EQ(config.zero.reduce_bucket_numel, 4096);
  EXPECT_EQ(config.zero.param_persistence_threshold, 640);
  config.resolve_auto(1000, 0, 5000);  // another model: computed anew
  EXPECT_EQ(config.zero.reduce_bucket_numel, 5000);
  EXPECT_EQ(config.zero.prefetch_bucket_numel, 5000);
  config.resolve_auto(10, 0, 1'000'000, 3000);  // a link that carries more in a round trip than such a model asks for
  EXPECT_EQ(config.zero.reduce_bucket_numel, 12'000);
  EXPECT_EQ(config.zero.prefetch_bucket_numel, 12'000);
  EXPECT_EQ(config.zero.param_persistence_threshold, 3000);
  EXPECT_EQ(row(config, "zero_optimization.prefetch_bucket_size"), "12000 <- link");
  EXPECT_EQ(config.notices().back(),
            "zero_optimization.param_persistence_threshold = \"auto\": 3000 elements, chosen from the link between hosts (3000 elements a "
            "round trip)");
  Config plain = Config::from_json(R"({"zero_optimization": {"stage": 3, "reduce_bucket_size": 77}})");
  plain.resolve_auto(1000, 0, 5000);
  EXPECT_EQ(plain.zero.reduce_bucket_numel, 77);
  EXPECT_EQ(plain.zero.param_persistence_threshold, 100'000);
}

TEST(Config, ToJsonIsTheInputWithTheTripleAndClippingResolved) {
  const Config config = Config::from_json(R"({ // mine
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2, "steps_per_print": Infinity,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8},
    "optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": [0.9, 0.95]}}, })",
                                          {.world_size = 4, .deepspeed_defaults = true});
  const auto json = nlohmann::json::parse(config.to_json());
  EXPECT_EQ(json["train_batch_size"], 8);
  EXPECT_EQ(json["train_micro_batch_size_per_gpu"], 2);
  EXPECT_EQ(json["gradient_accumulation_steps"], 1);
  EXPECT_EQ(json["gradient_clipping"], 1.0);
  EXPECT_EQ(json["zero_optimization"]["stage"], 2);
  EXPECT_EQ(json["optimizer"]["params"].dump(), R"({"betas":[0.9,0.95]})");
  EXPECT_TRUE(json["steps_per_print"].is_null());
  EXPECT_EQ(Config::from_json(config.to_json(), {.world_size = 4}).batch.train_batch_size, 8);  // and it is a configuration again
}

TEST(Config, DamagedTextLoadsOrIsAConfigErrorNothingElse) {
  const std::string text =
      R"({"train_batch_size": "auto", "steps_per_print": Infinity, /* c */ "fp16": {"enabled": false, "loss_scale": 1e3},
    "optimizer": {"type": "Adam", "params": {"betas": [0.9, 0.999], "lr": 1e-3}}, "scheduler": {"type": "WarmupLR", "params": {}}, // d
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "reduce_bucket_size": "auto"}, "compile": {"passes": [],},})";
  std::mt19937 random(11);
  constexpr std::string_view kBytes = "{}[],:\"'/*#-+.0123456789eEtrufalsnIy\n\\ \xC3";
  int loaded = 0, refused = 0;
  for (int i = 0; i < 5000; ++i) {
    std::string damaged = text;
    for (int edits = 1 + static_cast<int>(random() % 3); edits > 0 && !damaged.empty(); --edits) {
      const std::size_t at = random() % damaged.size();
      switch (random() % 4) {
        case 0:
          damaged.erase(at, 1 + random() % 4);
          break;
        case 1:
          damaged.insert(at, 1, kBytes[random() % kBytes.size()]);
          break;
        case 2:
          damaged[at] = kBytes[random() % kBytes.size()];
          break;
        default:
          damaged.resize(at + 1);
      }
    }
    try {
      Config config = Config::from_json(damaged, {.world_size = 2});
      config.resolve_auto(8, 64, 100);
      EXPECT_FALSE(config.table().empty());
      EXPECT_NO_THROW(Config::from_json(config.to_json(), {.world_size = 2})) << damaged << "\n" << config.to_json();
      ++loaded;
    } catch (const ConfigError&) {
      ++refused;  // any other exception ends the test
    }
  }
  EXPECT_GT(loaded, 50);
  EXPECT_GT(refused, 1000);
}

TEST(Config, TheTableHidesSecrets) {
  EXPECT_EQ(row(Config::from_json(R"({"comet": {"api_key": "s3cret"}})"), "comet.api_key"), "(hidden) <- argument");
}

TEST(Config, MembersSetInCodeShowInTheTableAndTheJson) {
  Config config;
  EXPECT_EQ(row(config, "zero_optimization.stage"), "0 <- default");
  config.zero.stage = 2;
  config.batch.train_batch_size = 6;
  EXPECT_EQ(row(config, "zero_optimization.stage"), "2 <- code");
  EXPECT_EQ(nlohmann::json::parse(config.to_json())["train_batch_size"], 6);
}

/// Sets a variable for one scope.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Environment() { ::unsetenv(name_); }

 private:
  const char* name_;
};

TEST(Config, TheEnvironmentDecidesOnSharedMemory) {
  EXPECT_TRUE(Config::from_json("{}").unshard.share_memory);
  const Environment off("UNSHARD_SHARE_MEMORY", "off");
  const Config config = Config::from_json(R"({"unshard": {"share_memory": "auto"}})");
  EXPECT_FALSE(config.unshard.share_memory);
  EXPECT_FALSE(Config().unshard.share_memory);
  EXPECT_EQ(row(config, "unshard.share_memory"), "off <- environment UNSHARD_SHARE_MEMORY");
  const Environment wrong("UNSHARD_SHARE_MEMORY", "no");
  EXPECT_THAT(error_of("{}"), HasSubstr("expected auto or off"));
}

TEST(Config, TheEnvironmentNamesTheHost) {
  EXPECT_EQ(Config::from_json("{}").unshard.host, "");
  EXPECT_EQ(Config::from_json(R"({"unshard": {"host": "left"}})").unshard.host, "left");
  const Environment named("UNSHARD_HOST", "right");
  const Config config = Config::from_json(R"({"unshard": {"host": "left"}})");
  EXPECT_EQ(config.unshard.host, "right");
  EXPECT_EQ(row(config, "unshard.host"), "right <- environment UNSHARD_HOST");
}

TEST(Config, AMissingFileIsNamed) {
  try {
    Config::from_file("no/such/ds_config.json");
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("no/such/ds_config.json"));
  }
}

}  // namespace
}  // namespace unshard
