// The configuration, input by input.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/config_test_util.h"
#include "unshard/core/config.h"
#include "unshard/core/error.h"

namespace unshard {
namespace {

using config_test::error_of;
using config_test::row;
using ::testing::HasSubstr;

/// One input and what the table says of one key.
struct Good {
  const char* json;
  const char* key;
  const char* row;
  int world = 1;
};

class ConfigAccepts : public ::testing::TestWithParam<Good> {};

TEST_P(ConfigAccepts, AndResolves) {
  const Good& c = GetParam();
  EXPECT_EQ(row(Config::from_json(c.json, {.world_size = c.world}), c.key), c.row) << c.json;
}

INSTANTIATE_TEST_SUITE_P(
    Batch, ConfigAccepts,
    ::testing::Values(
        Good{R"({"train_batch_size": 32})", "train_micro_batch_size_per_gpu", "8 <- derived", 4},
        Good{R"({"train_batch_size": 32})", "gradient_accumulation_steps", "1 <- derived", 4},
        Good{R"({"train_batch_size": 32})", "train_batch_size", "32 <- argument", 4},
        Good{R"({"train_micro_batch_size_per_gpu": 3})", "train_batch_size", "12 <- derived", 4},
        Good{R"({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5})", "train_batch_size", "60 <- derived", 4},
        Good{R"({"train_batch_size": 64, "gradient_accumulation_steps": 2})", "train_micro_batch_size_per_gpu", "8 <- derived", 4},
        Good{R"({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2})", "gradient_accumulation_steps", "8 <- derived", 4},
        Good{R"({"train_batch_size": 48, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 6})", "train_batch_size",
             "48 <- argument", 4},
        Good{R"({})", "train_micro_batch_size_per_gpu", "1 <- default", 4}, Good{R"({})", "train_batch_size", "4 <- derived", 4},
        Good{R"({"gradient_accumulation_steps": 3})", "train_batch_size", "12 <- derived", 4},
        Good{R"({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto"})",
             "train_batch_size", "4 <- derived", 2},
        Good{R"({"train_batch_size": null, "train_micro_batch_size_per_gpu": 2})", "train_batch_size", "4 <- derived", 2},
        Good{R"({"train_batch_size": 3.2e1})", "train_batch_size", "32 <- argument", 1}));

INSTANTIATE_TEST_SUITE_P(
    Forms, ConfigAccepts,
    ::testing::Values(
        Good{R"({"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}})", "zero_optimization.reduce_bucket_size",
             "500000000 <- argument"},
        Good{R"({"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 7}})", "zero_optimization.prefetch_bucket_size",
             "7 <- argument"},
        Good{R"({"zero_optimization": {"stage": 3, "prefetch_bucket_size": 7}})", "zero_optimization.prefetch_bucket_size",
             "7 <- argument"},
        Good{R"({"zero_optimization": {"stage3_gather_fp16_weights_on_model_save": true}})",
             "zero_optimization.gather_16bit_weights_on_model_save", "true <- argument"},
        Good{R"({"zero_optimization": true})", "zero_optimization.stage", "1 <- argument"},
        Good{R"({"zero_optimization": false})", "zero_optimization.stage", "0 <- argument"},
        Good{R"({"zero_optimization": true, "allgather_size": 9})", "zero_optimization.allgather_bucket_size", "9 <- argument"},
        Good{R"({"zero_optimization": {"stage": 3}})", "zero_optimization.overlap_comm", "true <- default"},
        Good{R"({"zero_optimization": {"stage": 2}})", "zero_optimization.overlap_comm", "true <- default"},
        Good{R"({"zero_optimization": {"stage": 3, "overlap_comm": false}})", "zero_optimization.overlap_comm", "false <- argument"},
        Good{R"({"zero_optimization": {"stage": 2, "cpu_offload": true}})", "zero_optimization.offload_optimizer.device",
             "cpu <- derived from cpu_offload"},
        Good{R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "CPU"}}})", "zero_optimization.offload_param.device",
             "cpu <- argument"},
        Good{R"({"zero_optimization": {"stage": 1, "offload_param": {"device": "none"}}})", "zero_optimization.offload_param.device",
             "none <- argument"},
        Good{R"({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}})", "zero_optimization.offload_param.device",
             "none <- argument"},
        Good{R"({"zero_optimization": {"offload_optimizer": null}})", "zero_optimization.offload_optimizer.device", "none <- default"},
        Good{R"({"bfloat16": {"enabled": true}})", "bf16.enabled", "true <- argument"},
        Good{R"({"steps_per_print": Infinity})", "steps_per_print", "null <- argument"},
        Good{R"({"steps_per_print": inf,})", "steps_per_print", "null <- argument"},
        Good{R"({"steps_per_print": 2e3})", "steps_per_print", "2000 <- argument"},
        Good{"{\n// a comment\n\"steps_per_print\": 5, # another\n/* and, one more */ }", "steps_per_print", "5 <- argument"},
        Good{R"({"aio": {"block_size": 4096,},})", "aio.block_size", "4096 <- argument"},
        Good{R"({"wandb": {"project": "a // b, # c /* d */ ,}", }})", "wandb.project",
             "a // b, # c /* d */ ,}"
             " <- argument"},
        Good{"\xEF\xBB\xBF{\"dump_state\": true}", "dump_state", "true <- argument"},
        Good{R"({"communication_data_type": "torch.bfloat16"})", "communication_data_type", "bf16 <- argument"},
        Good{R"({"data_types": {"grad_accum_dtype": "float32"}})", "data_types.grad_accum_dtype", "fp32 <- argument"},
        Good{R"({"gradient_allreduce_op": "SUM"})", "gradient_allreduce_op", "sum <- argument"},
        Good{R"({"unshard": {"share_memory": "off"}})", "unshard.share_memory", "off <- argument"},
        Good{R"({"unshard": {"share_memory": true}})", "unshard.share_memory", "auto <- argument"},
        Good{R"({"checkpoint": {"tag_validation": "WARN"}})", "checkpoint.tag_validation", "Warn <- argument"},
        Good{R"({"gradient_clipping": 1})", "gradient_clipping", "1.0 <- argument"}, Good{R"({})", "gradient_clipping", "0.0 <- default"},
        Good{R"({"optimizer": {"type": "adamw", "params": {"lr": 1e-4}}})", "optimizer.params.lr", "0.0001 <- argument"},
        Good{R"({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})", "optimizer.params.lr", "0.001 <- default"},
        Good{R"({"optimizer": {"type": "RMSprop", "params": {"alpha": 0.9}}})", "optimizer.params.alpha", "0.9 <- argument"},
        Good{R"({"optimizer": {"type": "Adam", "params": {"torch_adam": true, "capturable": true}}})", "optimizer.params.capturable",
             "true <- argument"},
        Good{R"({"scheduler": {"type": "warmuplr", "params": {"warmup_num_steps": 1e2}}})", "scheduler.type", "WarmupLR <- argument"},
        Good{R"({"scheduler": {"type": "StepLR", "params": {"step_size": 3}}})", "scheduler.params.step_size", "3 <- argument"},
        Good{
            R"({"data_efficiency": {"data_sampling": {"curriculum_learning": {"curriculum_metrics": {"seqlen": {"min_difficulty": 8}}}}}})",
            "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.seqlen.min_difficulty", "8 <- argument"}));

/// One input and pieces of the error.
struct Bad {
  const char* json;
  std::vector<std::string> pieces;
  int world = 1;
};

class ConfigRefuses : public ::testing::TestWithParam<Bad> {};

TEST_P(ConfigRefuses, AndSaysWhy) {
  const Bad& c = GetParam();
  const std::string message = error_of(c.json, {.world_size = c.world, .source = "ds.json"});
  EXPECT_THAT(message, HasSubstr("[config] ")) << c.json;
  EXPECT_THAT(message, HasSubstr("ds.json")) << c.json;
  for (const auto& piece : c.pieces) EXPECT_THAT(message, HasSubstr(piece)) << c.json;
}

INSTANTIATE_TEST_SUITE_P(
    Batch, ConfigRefuses,
    ::testing::Values(
        Bad{R"({"train_batch_size": 33, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2})",
            {"train_batch_size 33 (ds.json) = train_micro_batch_size_per_gpu 4 (ds.json) * gradient_accumulation_steps 2 (ds.json) * world "
             "size 4",
             "33 != 4 * 2 * 4 = 32", "set train_batch_size to 32"},
            4},
        Bad{R"({"train_batch_size": 30})", {"train_batch_size 30", "world size = 4", "28 or 32"}, 4},
        Bad{R"({"train_batch_size": 3})", {"train_batch_size 3", "set train_batch_size to 4,"}, 4},
        Bad{R"({"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4})",
            {"train_micro_batch_size_per_gpu * world size = 8", "24 or 32", "gradient_accumulation_steps (not given)"},
            2},
        Bad{R"({"train_batch_size": 30, "gradient_accumulation_steps": 4})",
            {"gradient_accumulation_steps * world size = 8", "24 or 32"},
            2},
        Bad{R"({"train_batch_size": 0})", {"train_batch_size = 0", "world size 1", "positive"}},
        Bad{R"({"train_micro_batch_size_per_gpu": -2})", {"train_micro_batch_size_per_gpu = -2", "train_batch_size (not given)"}},
        Bad{R"({"gradient_accumulation_steps": 0})", {"gradient_accumulation_steps = 0"}},
        Bad{R"({"train_micro_batch_size_per_gpu": 9e18, "gradient_accumulation_steps": 9})",
            {"overflow", "train_micro_batch_size_per_gpu 9000000000000000000"}},
        Bad{R"({"train_batch_size": 2.5})", {"train_batch_size = 2.5", "expected an integer"}},
        Bad{R"({"train_batch_size": "32"})", {"train_batch_size = \"32\"", "expected an integer", "remove the quotation marks"}}));

INSTANTIATE_TEST_SUITE_P(
    Keys, ConfigRefuses,
    ::testing::Values(Bad{R"({"zero_optimizatoin": {"stage": 2}})", {"unknown key zero_optimizatoin", "\"zero_optimization\""}},
                      Bad{R"({"zero_optimization": {"stge": 2}})", {"unknown key zero_optimization.stge", "\"stage\""}},
                      Bad{R"({"zero_optimization": {"stage3_prefetch_bucket_sizes": 2}})", {"\"stage3_prefetch_bucket_size\""}},
                      Bad{R"({"zero_optimization": {"offload_optimizer": {"pin_memroy": true}}})",
                          {"zero_optimization.offload_optimizer.pin_memroy", "\"pin_memory\""}},
                      Bad{R"({"activation_checkpointing": {"cpu_checkpoint": true}})",
                          {"activation_checkpointing.cpu_checkpoint", "\"cpu_checkpointing\""}},
                      Bad{R"({"aio": {"blocksize": 1}})", {"aio.blocksize", "\"block_size\""}},
                      Bad{R"({"optimizer": {"type": "Adam", "params": {"beta": [0.9, 0.99]}}})", {"optimizer.params.beta", "\"betas\""}},
                      Bad{R"({"optimizer": {"type": "sgd", "params": {"betas": [0.9, 0.99]}}})", {"unknown key optimizer.params.betas"}},
                      Bad{R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}})",
                          {"scheduler.params.warmup_steps", "\"warmup_num_steps\""}},
                      Bad{R"({"tensor_parallel": {"partition_config": {"layer_specs": [{"patterns": []}, {"pattern": []}]}}})",
                          {"tensor_parallel.partition_config.layer_specs[1].pattern", "\"patterns\""}},
                      Bad{R"({"overlap_comm": true})", {"unknown key overlap_comm", "it belongs in \"zero_optimization\""}},
                      Bad{R"({"bf16": {"loss_scale": 0}})", {"unknown key bf16.loss_scale", "it belongs in \"fp16\""}},
                      Bad{R"({"amp": {"enabled": true}})", {"amp", "was removed", "bf16"}},
                      Bad{R"({"zero_optimization": {"mics_shard_size": 4}})", {"zero_optimization.mics_shard_size", "was removed"}},
                      Bad{R"({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}})",
                          {"optimizer.params.max_grad_norm = 1.0", "gradient_clipping"}},
                      Bad{R"({"optimizer": {"type": "RMSprop", "params": {"max_grad_norm": 1.0}}})",
                          {"optimizer.params.max_grad_norm", "gradient_clipping"}},
                      Bad{R"({"zero_optimization": {"stage": 3, "prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 2}})",
                          {"zero_optimization.prefetch_bucket_size", "twice", "stage3_prefetch_bucket_size"}},
                      Bad{R"({"fp16": {"enabled": true, "enabled": false}})", {"fp16.enabled is given twice"}},
                      Bad{R"({"tensor_parallel": {"partition_config": {"layer_specs": [{}, {"shape": [], "shape": []}]}}})",
                          {"tensor_parallel.partition_config.layer_specs[1].shape is given twice"}}));

INSTANTIATE_TEST_SUITE_P(
    Values, ConfigRefuses,
    ::testing::Values(
        Bad{R"({"zero_optimization": {"stage": 4}})", {"zero_optimization.stage = 4", "from 0 to 3"}},
        Bad{R"({"zero_optimization": {"stage": -1}})", {"zero_optimization.stage = -1"}},
        Bad{R"({"zero_optimization": {"stage": "three"}})", {"zero_optimization.stage = \"three\""}},
        Bad{R"({"zero_optimization": {"stage": "3"}})", {"zero_optimization.stage = \"3\"", "remove the quotation marks"}},
        Bad{R"({"zero_optimization": {"stage": null}})", {"zero_optimization.stage = null"}},
        Bad{R"({"zero_optimization": {"reduce_bucket_size": 0}})", {"zero_optimization.reduce_bucket_size = 0", "at least 1"}},
        Bad{R"({"zero_optimization": {"reduce_bucket_size": 1e30}})", {"zero_optimization.reduce_bucket_size = 1e+30"}},
        Bad{R"({"zero_optimization": {"reduce_bucket_size": 99999999999999999999}})", {"zero_optimization.reduce_bucket_size"}},
        Bad{R"({"zero_optimization": {"reduce_bucket_size": 18446744073709551615}})", {"zero_optimization.reduce_bucket_size"}},
        Bad{R"({"zero_optimization": {"reduce_bucket_size": Infinity}})", {"zero_optimization.reduce_bucket_size = \"Infinity\""}},
        Bad{R"({"gradient_clipping": -1})", {"gradient_clipping = -1", "at least 0"}},
        Bad{R"({"gradient_clipping": NaN})", {"gradient_clipping = \"NaN\"", "a number"}},
        Bad{R"({"fp16": {"enabled": "true"}})", {"fp16.enabled = \"true\"", "true or false", "quotation"}},
        Bad{R"({"fp16": {"enabled": 1}})", {"fp16.enabled = 1", "true or false"}},
        Bad{R"({"fp16": true})", {"fp16 = true", "expected an object"}},
        Bad{R"({"communication_data_type": "fp8"})", {"communication_data_type = \"fp8\"", "fp32, bf16 or fp16"}},
        Bad{R"({"communication_data_type": "int64"})", {"communication_data_type = \"int64\""}},
        Bad{R"({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}})", {"optimizer.params.betas = [0.9]", "2 numbers"}},
        Bad{R"({"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.0]}}})", {"optimizer.params.betas", "less than 1"}},
        Bad{R"({"optimizer": {"type": "Adam", "params": {"lr": "1e-3"}}})", {"optimizer.params.lr = \"1e-3\"", "quotation"}},
        Bad{R"({"optimizer": {"type": "auto"}})", {"optimizer.type = \"auto\""}},
        Bad{R"({"optimizer": {"params": {"lr": 1}}})", {"optimizer.params", "optimizer.type"}},
        Bad{R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": [0, -1]}}})",
            {"scheduler.params.warmup_min_lr = [0,-1]", "a list with one for each parameter group"}},
        Bad{R"({"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": []}}})",
            {"scheduler.params.lr_range_test_min_lr = []", "a number of at least 0"}},
        Bad{R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}})",
            {"scheduler.params.warmup_num_steps = 0", "at least 1"}},
        Bad{R"({"scheduler": {"type": "WarmupDecayLR", "params": {}}})", {"scheduler.params.total_num_steps is missing"}},
        Bad{R"({"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}}})",
            {"scheduler.params.total_num_steps is missing", "auto"}},
        Bad{R"({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}})", {"scheduler.params.cycle_max_lr is missing"}},
        Bad{R"({"unshard": {"timeout_s": 0}})", {"unshard.timeout_s = 0", "greater than 0"}},
        Bad{R"({"unshard": {"share_memory": "maybe"}})", {"unshard.share_memory = \"maybe\"", "\"off\""}}));

INSTANTIATE_TEST_SUITE_P(Combinations, ConfigRefuses,
                         ::testing::Values(Bad{R"({"fp16": {"enabled": true}, "bf16": {"enabled": true}})",
                                               {"fp16.enabled = true and bf16.enabled = true"}},
                                           Bad{R"({"zero_optimization": {"cpu_offload": true, "offload_optimizer": {"device": "cpu"}}})",
                                               {"cpu_offload", "both are given"}},
                                           Bad{R"({"zero_optimization": {"stage": 3}, "gradient_allreduce_op": "sum"})",
                                               {"gradient_allreduce_op = \"sum\"", "stage = 3"}}));

INSTANTIATE_TEST_SUITE_P(
    NotBuilt, ConfigRefuses,
    ::testing::Values(
        Bad{R"({"zero_optimization": {"stage": 3, "zero_quantized_weights": true}})",
            {"known, not built yet: zero_optimization.zero_quantized_weights = true", "set it to false"}},
        Bad{R"({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}})",
            {"not built yet", "offload_optimizer.device = \"nvme\""}},
        Bad{R"({"zero_optimization": {"stage": 2, "zenflow": {}}})", {"not built yet: zero_optimization.zenflow = {}", "remove it"}},
        Bad{R"({"zero_optimization": {"stage": 2, "zenflow": {"topkratio": 0.1}}})",
            {"unknown key zero_optimization.zenflow.topkratio", "\"topk_ratio\""}},
        Bad{R"({"tensor_parallel": {"tp": {"tp_size": 2}}})",
            {"not built yet: tensor_parallel.tensor_parallel.tp_size = 2", "set it to 1"}},
        Bad{R"({"flops_profiler": {"enabled": true}})", {"not built yet: flops_profiler.enabled = true"}},
        Bad{R"({"sequence_parallel_size": 2})", {"not built yet: sequence_parallel_size = 2"}},
        Bad{R"({"optimizer": {"type": "Lamb", "params": {"max_coef": 1}}})", {"unknown key optimizer.params.max_coef", "\"max_coeff\""}},
        Bad{R"({"optimizer": {"type": "MuAdam"}})", {"not built yet: optimizer.type = \"MuAdam\""}},
        Bad{R"({"optimizer": {"type": "Muon"}})", {"pass a torch.optim.Muon of your own", "stage 0 only"}},
        Bad{R"({"optimizer": {"type": "OneBitAdam"}})", {"optimizer.type = \"OneBitAdam\"", "was removed"}},
        Bad{R"({"optimizer": {"type": "Adam", "params": {"amsgrad": true}}})", {"not built yet: optimizer.params.amsgrad = true"}},
        Bad{R"({"bf16": {"enabled": true, "bf16_master_weights_and_grads": true}})",
            {"not built yet: bf16.bf16_master_weights_and_grads"}}));

INSTANTIATE_TEST_SUITE_P(Syntax, ConfigRefuses,
                         ::testing::Values(Bad{"", {"isn't valid JSON", "line 1"}}, Bad{"[]", {"array"}},
                                           Bad{"{\"dump_state\": true", {"isn't valid JSON"}},
                                           Bad{"{\"dump_state\":\n tru}", {"isn't valid JSON", "line 2"}}, Bad{"{,}", {"isn't valid JSON"}},
                                           Bad{"{\"aio\": {},,}", {"isn't valid JSON"}}, Bad{"{\"dump_state\" true}", {"isn't valid JSON"}},
                                           Bad{"{} /* open", {"isn't valid JSON"}}, Bad{"{\"a", {"isn't valid JSON"}},
                                           Bad{"{\"compile\": {\"passes\": [,]}}", {"isn't valid JSON"}},
                                           Bad{"{} {}", {"isn't valid JSON"}}));

}  // namespace
}  // namespace unshard
