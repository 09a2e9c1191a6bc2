// Rows of the top level, precision, and Unshard's own section.
#include "core/config_schema.h"

namespace unshard::config {
namespace {

using enum Kind;
using enum State;

Section top_level() {
  return {
      "",
      {
          {.name = "train_batch_size", .kind = integer, .note = "at least 1; samples per update over all ranks; derived when absent"},
          {.name = "train_micro_batch_size_per_gpu", .kind = integer, .note = "at least 1; samples per rank per forward; derived, else 1"},
          {.name = "gradient_accumulation_steps", .kind = integer, .note = "at least 1; micro-batches per update; derived, else 1"},
          {.name = "managed_gradient_accumulation",
           .initial = "true",
           .note = "the engine counts micro-steps; false: every step() updates"},
          {.name = "steps_per_print",
           .kind = integer,
           .range = {.min = 1},
           .note = "progress line every so many steps; null or infinity: never",
           .infinite = true},
          {.name = "dump_state", .initial = "false", .note = "print the engine's state at start"},
          {.name = "disable_python_gc", .initial = "false", .note = "Python's cyclic collector is off; engine.collect_python_gc()"},
          {.name = "log_level",
           .kind = choice,
           .accepted = R"(["debug", "info", "warning", "error", "critical"])",
           .note = "of the logger named DeepSpeed"},
          {.name = "wall_clock_breakdown", .initial = "false", .note = "time forward, backward and step"},
          {.name = "memory_breakdown",
           .initial = "false",
           .note = "memory at start and with each progress line; engine.memory_report() tells at any time"},
          {.name = "vocabulary_size", .kind = integer, .state = accepted, .range = {.min = 1}},
          {.name = "dataloader_drop_last", .initial = "false", .note = "drop the last partial batch"},
          {.name = "use_data_before_expert_parallelism", .initial = "false", .state = accepted},
          {.name = "sequence_parallel_size", .kind = integer, .state = not_built, .range = {.min = 1}, .idle = "[1]"},
          {.name = "data_parallel_size", .kind = integer, .state = accepted, .range = {.min = 1}},
          {.name = "fp16", .kind = section},
          {.name = "bf16", .kind = section, .aliases = {"bfloat16"}},
          {.name = "torch_autocast", .kind = section},
          {.name = "data_types", .kind = section},
          {.name = "gradient_clipping",
           .kind = number,
           .initial = "0",
           .range = {.min = 0},
           .note = "largest global 2-norm; 0: off; the drop-in's default is 1.0"},
          {.name = "prescale_gradients",
           .initial = "false",
           .state = accepted,
           .note = "sums are made in fp32 and divided once: nothing overflows"},
          {.name = "gradient_predivide_factor",
           .kind = number,
           .initial = "1.0",
           .state = accepted,
           .range = {.min = 0, .open_min = true},
           .note = "as prescale_gradients"},
          {.name = "gradient_allreduce_op",
           .kind = choice,
           .initial = R"("mean")",
           .accepted = R"(["mean", "sum"])",
           .note = "sum is refused at stage 3"},
          {.name = "communication_data_type", .kind = dtype, .note = "dtype of gradient reductions"},
          {.name = "seq_parallel_communication_data_type", .kind = dtype, .initial = R"("fp32")", .state = accepted},
          {.name = "disable_allgather", .initial = "false", .state = accepted},
          {.name = "optimizer", .kind = section},
          {.name = "scheduler", .kind = section},
          {.name = "zero_allow_untested_optimizer",
           .initial = "false",
           .state = accepted,
           .note = "not needed: every optimizer runs at every stage"},
          {.name = "zero_force_ds_cpu_optimizer", .initial = "true", .state = accepted},
          {.name = "zero_optimization", .kind = section, .note = "true stands for stage 1, false for stage 0"},
          {.name = "allgather_size", .kind = integer, .initial = "500000000", .state = accepted, .range = {.min = 0}},
          {.name = "activation_checkpointing", .kind = section},
          {.name = "aio", .kind = section},
          {.name = "checkpoint", .kind = section},
          {.name = "datastates_ckpt", .kind = any, .state = not_built, .idle = "[false]"},
          {.name = "pipeline", .kind = section},
          {.name = "tensor_parallel", .kind = section},
          {.name = "expert_parallel", .kind = section},
          {.name = "compile", .kind = section},
          {.name = "tensorboard", .kind = section},
          {.name = "wandb", .kind = section},
          {.name = "csv_monitor", .kind = section},
          {.name = "comet", .kind = section},
          {.name = "comms_logger", .kind = section},
          {.name = "flops_profiler", .kind = section},
          {.name = "timers", .kind = section},
          {.name = "autotuning", .kind = section},
          {.name = "data_efficiency", .kind = section},
          {.name = "hybrid_engine", .kind = section},
          {.name = "weight_quantization", .kind = section},
          {.name = "inference", .kind = object, .state = not_built, .idle = "[{}]", .note = "read by Hugging Face only"},
          {.name = "msamp", .kind = section, .note = "written by accelerate only"},
          {.name = "unshard", .kind = section, .note = "options of Unshard's own"},
          {.name = "nebula", .state = removed},
          {.name = "compression_training", .state = removed},
          {.name = "amp", .state = removed, .note = "use bf16, fp16 or torch_autocast"},
          {.name = "quantize_training", .state = removed},
          {.name = "sparse_gradients", .state = removed},
          {.name = "eigenvalue", .state = removed},
          {.name = "sparse_attention", .state = removed},
          {.name = "elasticity", .state = removed},
          {.name = "graph_harvesting", .state = removed},
          {.name = "curriculum_learning", .state = removed, .note = "its later form is data_efficiency.data_sampling.curriculum_learning"},
          {.name = "progressive_layer_drop", .state = removed},
      }};
}

Section fp16_section() {
  return {"fp16",
          {
              {.name = "enabled", .initial = "false", .note = "fp16 weights with fp32 master weights; excludes bf16"},
              {.name = "auto_cast", .initial = "false", .note = "cast floating inputs of forward to half"},
              {.name = "loss_scale", .kind = number, .initial = "0", .range = {.min = 0}, .note = "static scale; 0: dynamic"},
              {.name = "initial_scale_power",
               .kind = integer,
               .initial = "16",
               .range = {.min = 0, .max = 126},
               .note = "the dynamic scale starts at 2 to this"},
              {.name = "loss_scale_window",
               .kind = integer,
               .initial = "1000",
               .range = {.min = 1, .max = 2147483647},
               .note = "clean steps before the scale doubles"},
              {.name = "hysteresis",
               .kind = integer,
               .initial = "2",
               .range = {.min = 1, .max = 2147483647},
               .note = "overflows tolerated before the scale halves"},
              {.name = "consecutive_hysteresis", .initial = "false", .note = "refill hysteresis after each clean step"},
              {.name = "min_loss_scale",
               .kind = number,
               .initial = "1",
               .range = {.min = 0, .open_min = true},
               .note = "floor of the dynamic scale"},
              {.name = "fp16_master_weights_and_grads", .initial = "false", .state = not_built},
          }};
}

Section bf16_section() {
  return {"bf16",
          {
              {.name = "enabled", .initial = "false", .note = "bf16 weights with fp32 master weights; excludes fp16"},
              {.name = "immediate_grad_update", .initial = "false", .state = accepted},
              {.name = "check_grad_overflow", .initial = "true", .note = "skip the update when a gradient isn't finite"},
              {.name = "bf16_master_weights_and_grads", .initial = "false", .state = not_built},
              {.name = "bf16_optimizer_states", .initial = "false", .state = not_built},
          }};
}

Section unshard_section() {
  return {
      "unshard",
      {
          {.name = "share_memory",
           .kind = choice,
           .initial = R"("auto")",
           .accepted = R"(["auto", true, "off", false])",
           .note = "ranks of one host share memory; off: all goes through c10d. The environment's UNSHARD_SHARE_MEMORY=off|auto wins"},
          {.name = "host",
           .kind = string,
           .initial = R"("")",
           .note = "cuts a machine in several hosts: ranks of one name share memory, others talk as if across machines. Empty: hosts are "
                   "found out. The environment's UNSHARD_HOST, which can differ by rank, wins"},
          {.name = "timeout_s",
           .kind = number,
           .initial = "1800",
           .range = {.min = 0, .open_min = true},
           .note = "wait for peers before saying who waits where"},
          {.name = "collective_check_s",
           .kind = number,
           .initial = "60",
           .range = {.min = 0, .open_min = true},
           .note = "wait for a rank that misses a collective call"},
          {.name = "debug", .initial = "false", .note = "compare what ranks wrote"},
          {.name = "run_dir",
           .kind = string,
           .initial = R"("")",
           .note = "a folder for what each rank knows when something goes wrong: `unshard doctor` reads it. The environment's "
                   "UNSHARD_RUN_DIR wins"},
          {.name = "timeline",
           .kind = string,
           .initial = R"("")",
           .note = "a folder: what each rank does when, as traces and as a page (docs/timeline.md). The environment's "
                   "UNSHARD_TIMELINE wins"},
          {.name = "checkpoint", .kind = section},
      }};
}

Section unshard_checkpoint_section() {
  return {"unshard.checkpoint",
          {
              {.name = "async",
               .initial = "false",
               .note = "save_checkpoint returns when the values are copied to host memory; files are written while training goes on"},
              {.name = "keep",
               .kind = integer,
               .initial = "0",
               .range = {.min = 0, .max = 1e9},
               .note = "after a save, remove all but the newest so many checkpoints of the folder; 0: keep all"},
          }};
}

}  // namespace

std::vector<Section> general_sections() {
  Section autocast = {"torch_autocast",
                      {
                          {.name = "enabled", .initial = "false", .note = "fp32 weights, forward under torch's autocast"},
                          {.name = "dtype", .kind = dtype, .note = "null: torch's default for the device"},
                          {.name = "lower_precision_safe_modules", .kind = strings, .state = accepted},
                      }};
  Section types = {"data_types",
                   {
                       {.name = "grad_accum_dtype", .kind = dtype, .note = "of gradient accumulation; null: fp32"},
                       {.name = "param_dtype", .kind = dtype, .note = "of the weights in forward, before fp16 and bf16"},
                       {.name = "buffer_dtype", .kind = dtype, .note = "null: buffers stay as they are"},
                       {.name = "keep_in_fp32_modules", .kind = strings, .initial = R"("auto")", .state = accepted},
                   }};
  Section msamp = {"msamp",
                   {
                       {.name = "enabled", .initial = "false", .state = not_built},
                       {.name = "opt_level", .kind = string, .state = accepted},
                   },
                   {},
                   true};
  return {top_level(), fp16_section(), bf16_section(), autocast, types, msamp, unshard_section(), unshard_checkpoint_section()};
}

}  // namespace unshard::config
