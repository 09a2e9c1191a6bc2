// Rows of zero_optimization and its sections.
#include "core/config_schema.h"

namespace unshard::config {
namespace {

using enum Kind;
using enum State;

Section zero() {
  return {
      "zero_optimization",
      {
          {.name = "stage",
           .kind = integer,
           .initial = "0",
           .range = {.min = 0, .max = 3},
           .note = "0: nothing, 1: optimizer states, 2: and gradients, 3: and parameters are partitioned"},
          {.name = "contiguous_gradients", .initial = "true", .state = accepted, .note = "buckets are always contiguous"},
          {.name = "reduce_scatter", .initial = "true", .state = accepted, .note = "gradients are always reduce-scattered"},
          {.name = "reduce_bucket_size",
           .kind = integer,
           .initial = "500000000",
           .range = kCount,
           .note = "elements; auto: from model and link"},
          {.name = "use_multi_rank_bucket_allreduce", .initial = "true", .state = accepted},
          {.name = "allgather_partitions", .initial = "true", .state = accepted, .note = "parameters are always all-gathered, in buckets"},
          {.name = "allgather_bucket_size", .kind = integer, .initial = "500000000", .range = kNotNegative, .note = "elements"},
          {.name = "overlap_comm", .note = "default true; DeepSpeed's is false at stages 1 and 2"},
          {.name = "compute_grad_norm", .initial = "true", .state = accepted},
          {.name = "load_from_fp32_weights", .initial = "true", .state = accepted},
          {.name = "elastic_checkpoint", .initial = "false", .state = accepted, .note = "checkpoints load at any number of ranks"},
          {.name = "offload_param", .kind = section, .note = "stage 3 only"},
          {.name = "offload_optimizer", .kind = section},
          {.name = "zenflow", .kind = section, .state = not_built},
          {.name = "sub_group_size", .kind = integer, .initial = "1000000000", .state = accepted, .range = kNotNegative},
          {.name = "cpu_offload", .kind = boolean, .note = "old form of offload_optimizer.device = cpu"},
          {.name = "cpu_offload_param", .kind = boolean, .note = "old form of offload_param.device = cpu"},
          {.name = "cpu_offload_use_pin_memory", .kind = boolean, .note = "old form of pin_memory in both offload sections"},
          {.name = "prefetch_bucket_size",
           .kind = integer,
           .initial = "50000000",
           .range = kNotNegative,
           .aliases = {"stage3_prefetch_bucket_size"},
           .note = "elements; auto: from model and link"},
          {.name = "param_persistence_threshold",
           .kind = integer,
           .initial = "100000",
           .range = kNotNegative,
           .aliases = {"stage3_param_persistence_threshold"},
           .note = "smaller parameters stay whole; auto: from model and link"},
          {.name = "model_persistence_threshold",
           .kind = integer,
           .initial = "9223372036854775807",
           .range = kNotNegative,
           .aliases = {"stage3_model_persistence_threshold"},
           .note = "cap on elements that stay whole"},
          {.name = "max_live_parameters",
           .kind = integer,
           .initial = "1000000000",
           .range = kNotNegative,
           .aliases = {"stage3_max_live_parameters"},
           .note = "elements gathered at once"},
          {.name = "max_reuse_distance",
           .kind = integer,
           .initial = "1000000000",
           .range = kNotNegative,
           .aliases = {"stage3_max_reuse_distance"},
           .note = "elements"},
          {.name = "gather_16bit_weights_on_model_save",
           .initial = "false",
           .aliases = {"stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"}},
          {.name = "module_granularity_threshold",
           .kind = integer,
           .initial = "0",
           .state = accepted,
           .range = kNotNegative,
           .aliases = {"stage3_module_granularity_threshold"}},
          {.name = "use_all_reduce_for_fetch_params",
           .initial = "false",
           .state = accepted,
           .aliases = {"stage3_use_all_reduce_for_fetch_params"}},
          {.name = "allgather_sequential", .initial = "false", .state = accepted, .aliases = {"stage3_allgather_sequential"}},
          {.name = "ignore_unused_parameters", .initial = "true", .state = accepted, .note = "an unused parameter is no error"},
          {.name = "legacy_stage1", .initial = "false", .state = accepted},
          {.name = "round_robin_gradients", .initial = "false", .state = accepted},
          {.name = "parameter_alignment", .initial = "false", .state = accepted},
          {.name = "zero_hpz_partition_size",
           .kind = integer,
           .initial = "1",
           .state = accepted,
           .range = kNotNegative,
           .note = "a host has one copy of what its ranks gather"},
          {.name = "zero_quantized_weights", .initial = "false", .state = not_built},
          {.name = "zero_quantized_nontrainable_weights", .initial = "false", .state = not_built},
          {.name = "zero_quantized_gradients", .initial = "false", .state = not_built},
          {.name = "memory_efficient_linear", .initial = "true", .state = accepted},
          {.name = "pipeline_loading_checkpoint", .initial = "false", .state = accepted},
          {.name = "override_module_apply", .initial = "true", .state = accepted},
          {.name = "log_trace_cache_warnings", .initial = "false", .state = accepted},
          {.name = "enable_sanity_checks", .initial = "false", .state = accepted},
          {.name = "save_muon_momentum_buffer_in_memory", .initial = "false", .state = accepted},
          {.name = "leaf_module", .kind = section},
          {.name = "mics_shard_size", .state = removed},
          {.name = "mics_hierarchical_params_gather", .state = removed},
          {.name = "zeropp_loco_param", .state = removed},
      }};
}

constexpr std::string_view kDevices = R"(["none", "cpu", "nvme"])";

Section offload_optimizer() {
  return {"zero_optimization.offload_optimizer",
          {
              {.name = "device", .kind = choice, .initial = R"("none")", .accepted = kDevices, .note = "nvme isn't built yet"},
              {.name = "nvme_path", .kind = string, .state = accepted},
              {.name = "buffer_count", .kind = integer, .initial = "4", .state = accepted, .range = kCount},
              {.name = "pin_memory", .initial = "true", .note = "page-locked host memory"},
              {.name = "pipeline_read", .initial = "false", .state = accepted},
              {.name = "pipeline_write", .initial = "false", .state = accepted},
              {.name = "fast_init", .initial = "false", .state = accepted},
              {.name = "ratio",
               .kind = number,
               .initial = "1.0",
               .state = accepted,
               .range = kShare,
               .note = "all of the optimizer's states are offloaded"},
              {.name = "super_offload", .initial = "false", .state = accepted},
              {.name = "cpuadam_cores_perc", .kind = number, .initial = "0.8", .state = accepted, .range = kShare},
          }};
}

Section offload_param() {
  return {"zero_optimization.offload_param",
          {
              {.name = "device", .kind = choice, .initial = R"("none")", .accepted = kDevices, .note = "nvme isn't built yet"},
              {.name = "nvme_path", .kind = string, .state = accepted},
              {.name = "buffer_count", .kind = integer, .initial = "5", .state = accepted, .range = kCount},
              {.name = "buffer_size", .kind = integer, .initial = "100000000", .state = accepted, .range = kCount},
              {.name = "max_in_cpu", .kind = integer, .initial = "1000000000", .state = accepted, .range = kNotNegative},
              {.name = "pin_memory", .initial = "true", .note = "page-locked host memory"},
          }};
}

Section zenflow() {
  return {"zero_optimization.zenflow",
          {
              {.name = "topk_ratio",
               .kind = number,
               .initial = "0.1",
               .state = accepted,
               .range = {.min = 0, .max = 1, .open_min = true, .open_max = true}},
              {.name = "select_strategy",
               .kind = choice,
               .initial = R"("auto")",
               .state = accepted,
               .accepted = R"(["auto", "step", "epoch"])"},
              {.name = "select_interval", .kind = integer, .initial = R"("auto")", .state = accepted, .range = kCount},
              {.name = "update_interval", .kind = integer, .initial = R"("auto")", .state = accepted, .range = kCount},
              {.name = "overlap_step", .initial = "false", .state = accepted},
              {.name = "offload", .initial = "false", .state = accepted},
              {.name = "auto_ratio", .kind = number, .initial = "0.99", .state = accepted, .range = kShare},
              {.name = "full_warm_up_rounds", .kind = integer, .initial = "0", .state = accepted, .range = kNotNegative},
              {.name = "pt_reserved_cores_perc", .kind = number, .initial = "0.5", .state = accepted, .range = kShare},
              {.name = "steps_per_epoch", .kind = integer, .state = accepted, .range = kCount},
          },
          {},
          true};
}

}  // namespace

std::vector<Section> zero_sections() {
  Section leaf = {"zero_optimization.leaf_module",
                  {
                      {.name = "classes", .kind = strings, .state = accepted},
                      {.name = "names", .kind = strings, .initial = "[]", .state = accepted},
                      {.name = "name_suffixes", .kind = strings, .initial = "[]", .state = accepted},
                  }};
  return {zero(), offload_optimizer(), offload_param(), zenflow(), leaf};
}

}  // namespace unshard::config
