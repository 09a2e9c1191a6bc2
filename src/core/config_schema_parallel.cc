// Rows of pipeline, tensor and expert parallelism, and of compile.
#include "core/config_schema.h"

namespace unshard::config {
namespace {

using enum Kind;
using enum State;

Section pipeline() {
  return {"pipeline",
          {
              {.name = "stages", .kind = integer, .initial = R"("auto")", .state = not_built, .range = kCount, .idle = "[1]"},
              {.name = "partition", .kind = string, .initial = R"("best")", .state = accepted},
              {.name = "seed_layers", .initial = "false", .state = not_built},
              {.name = "activation_checkpoint_interval", .kind = integer, .initial = "0", .state = not_built, .range = kNotNegative},
              {.name = "pipe_partitioned", .initial = "true", .state = accepted},
              {.name = "grad_partitioned", .initial = "true", .state = accepted},
          }};
}

std::vector<Section> tensor_parallel() {
  Section main = {"tensor_parallel",
                  {
                      {.name = "autotp_size", .kind = integer, .initial = "0", .state = not_built, .range = kNotNegative, .idle = "[1]"},
                      {.name = "dtype", .kind = dtype, .initial = R"("fp16")", .state = accepted},
                      {.name = "tp_overlap_comm", .initial = "false", .state = accepted},
                      {.name = "vocab_parallel_lm_head", .state = accepted},
                      {.name = "vocab_parallel_ce_backend",
                       .kind = choice,
                       .initial = R"("torch")",
                       .state = accepted,
                       .accepted = R"(["torch", "liger"])"},
                      {.name = "preset_model",
                       .kind = choice,
                       .state = accepted,
                       .accepted = R"(["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"])"},
                      {.name = "partition_config", .kind = section},
                      {.name = "tensor_parallel", .kind = section, .aliases = {"tp"}},
                      {.name = "injection_policy_tuple", .kind = list, .state = accepted},
                      {.name = "keep_module_on_host", .initial = "false", .state = accepted},
                      {.name = "replace_with_kernel_inject", .initial = "false", .state = not_built},
                  },
                  {},
                  true};
  Section inner = {"tensor_parallel.tensor_parallel",
                   {
                       {.name = "tp_size", .kind = integer, .initial = "1", .state = not_built, .range = kCount},
                       {.name = "tp_grain_size", .kind = integer, .initial = "1", .state = accepted, .range = kCount},
                       {.name = "mpu", .kind = any, .state = accepted},
                       {.name = "tp_group", .kind = any, .state = accepted},
                   },
                   {},
                   true};
  Section partition = {"tensor_parallel.partition_config",
                       {
                           {.name = "tp_size", .kind = integer, .initial = "1", .state = not_built, .range = kCount},
                           {.name = "use_default_specs", .initial = "true", .state = accepted},
                           {.name = "strict_mode", .initial = "false", .state = accepted},
                           {.name = "embedding_partition_dim", .kind = integer, .initial = "1", .state = accepted, .range = kNotNegative},
                           {.name = "lm_head_patterns", .kind = strings, .state = accepted},
                           {.name = "layer_specs", .kind = section_list, .state = accepted},
                       },
                       {},
                       true};
  Section specs = {"tensor_parallel.partition_config.layer_specs[]",
                   {
                       {.name = "patterns", .kind = strings, .state = accepted},
                       {.name = "partition_type", .kind = choice, .state = accepted, .accepted = R"(["column", "row", "skip"])"},
                       {.name = "shape", .kind = list, .state = accepted},
                       {.name = "partition_dim", .kind = integer, .state = accepted},
                       {.name = "model_types", .kind = strings, .state = accepted},
                       {.name = "gather_output", .state = accepted},
                       {.name = "grad_allreduce", .state = accepted},
                   },
                   {},
                   true};
  return {main, inner, partition, specs};
}

Section expert_parallel() {
  return {"expert_parallel",
          {
              {.name = "enabled", .initial = "false", .state = not_built},
              {.name = "autoep_size", .kind = integer, .initial = "1", .state = not_built, .range = kCount},
              {.name = "expert_tensor_parallel_size", .kind = integer, .initial = "1", .state = not_built, .range = kCount},
              {.name = "preset_model", .kind = string, .state = accepted},
              {.name = "moe_layer_pattern", .kind = string, .state = accepted},
              {.name = "expert_pattern", .kind = string, .state = accepted},
              {.name = "router_pattern", .kind = string, .state = accepted},
              {.name = "use_grouped_mm", .initial = "true", .state = accepted},
              {.name = "disable_triton_grouped_mm", .initial = "false", .state = accepted},
              {.name = "route_norm", .kind = any, .state = accepted},
              {.name = "route_scale", .kind = number, .initial = "1.0", .state = accepted},
              {.name = "score_apply", .kind = string, .initial = R"("auto")", .state = accepted},
              {.name = "score_func", .kind = string, .initial = R"("auto")", .state = accepted},
              {.name = "top_k", .kind = integer, .initial = R"("auto")", .state = accepted, .range = kCount},
              {.name = "routed_scaling_factor", .kind = number, .initial = R"("auto")", .state = accepted},
              {.name = "combine_impl", .kind = string, .initial = R"("auto")", .state = accepted},
              {.name = "row_weighting_impl", .kind = string, .initial = R"("auto")", .state = accepted},
              {.name = "gate_up_impl", .kind = string, .initial = R"("separate")", .state = accepted},
              {.name = "comm_backend", .kind = choice, .initial = R"("comm")", .state = accepted, .accepted = R"(["comm", "deepep"])"},
              {.name = "comm_num_sm", .kind = integer, .initial = "12", .state = accepted, .range = kNotNegative},
              {.name = "comm_qp_margin", .kind = integer, .initial = "4", .state = accepted, .range = kNotNegative},
              {.name = "comm_max_tokens_per_rank", .kind = integer, .initial = "0", .state = accepted, .range = kNotNegative},
              {.name = "num_expert_groups", .kind = integer, .state = accepted, .range = kCount},
              {.name = "num_limited_groups", .kind = integer, .state = accepted, .range = kCount},
              {.name = "expert_w1", .kind = string, .state = accepted},
              {.name = "expert_w2", .kind = string, .state = accepted},
              {.name = "expert_w3", .kind = string, .state = accepted},
              {.name = "num_experts_attr", .kind = any, .state = accepted},
              {.name = "top_k_attr", .kind = any, .state = accepted},
              {.name = "has_shared_experts", .kind = any, .state = accepted},
              {.name = "shared_experts_pattern", .kind = any, .state = accepted},
              {.name = "shared_experts_gate_pattern", .kind = any, .state = accepted},
              {.name = "expert_activation", .kind = any, .state = accepted},
              {.name = "async_split_plan", .initial = "false", .state = accepted},
              {.name = "validate_folding_routing", .initial = "false", .state = accepted},
              {.name = "load_balance_coeff", .kind = any, .state = not_built},
          },
          {},
          true};
}

Section compile() {
  return {"compile",
          {
              {.name = "deepcompile", .initial = "false", .state = not_built},
              {.name = "passes", .kind = strings, .state = not_built, .idle = "[[]]"},
              {.name = "autoep_non_moe", .initial = "false", .state = not_built},
              {.name = "free_activation", .initial = "false", .state = not_built},
              {.name = "free_activation_threshold", .kind = integer, .initial = "10485760", .state = accepted, .range = kNotNegative},
              {.name = "offload_activation", .initial = "false", .state = not_built},
              {.name = "offload_activation_pin_memory", .initial = "true", .state = accepted},
              {.name = "offload_opt_states", .initial = "false", .state = not_built},
              {.name = "offload_parameters", .initial = "false", .state = not_built},
              {.name = "double_buffer", .initial = "true", .state = accepted},
              {.name = "symmetric_memory", .initial = "false", .state = accepted},
              {.name = "debug_log", .initial = "false", .state = accepted},
              {.name = "sync_before_reduce", .initial = "false", .state = accepted},
              {.name = "sync_after_reduce", .initial = "false", .state = accepted},
              {.name = "sync_before_allgather", .initial = "false", .state = accepted},
              {.name = "sync_after_allgather", .initial = "false", .state = accepted},
              {.name = "keep_int_input_tensors", .initial = "true", .state = accepted},
              {.name = "keep_all_input_tensors", .initial = "false", .state = accepted},
              {.name = "enabled", .state = removed, .note = "compiling is started by engine.compile()"},
              {.name = "backend", .state = removed, .note = "the backend is an argument of engine.compile()"},
          },
          {},
          true};
}

}  // namespace

std::vector<Section> parallel_sections() {
  std::vector<Section> sections = {pipeline()};
  for (auto& section : tensor_parallel()) sections.push_back(std::move(section));
  sections.push_back(expert_parallel());
  sections.push_back(compile());
  return sections;
}

}  // namespace unshard::config
