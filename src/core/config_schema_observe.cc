// Rows of monitoring, profiling, tuning and data.
#include "core/config_schema.h"

namespace unshard::config {
namespace {

using enum Kind;
using enum State;

constexpr std::string_view kJobName = R"("DeepSpeedJobName")";

Key enabled(State state = not_built) { return {.name = "enabled", .initial = "false", .state = state}; }

std::vector<Section> monitors() {
  Section tensorboard = {
      "tensorboard",
      {
          enabled(built),
          {.name = "output_path", .kind = string, .initial = R"("")", .note = "folder; files go to output_path/job_name"},
          {.name = "job_name", .kind = string, .initial = kJobName},
      },
      {},
      true};
  Section csv = tensorboard;
  csv.path = "csv_monitor";
  Section wandb = {"wandb",
                   {
                       enabled(built),
                       {.name = "group", .kind = string},
                       {.name = "team", .kind = string},
                       {.name = "project", .kind = string, .initial = R"("deepspeed")"},
                   },
                   {},
                   true};
  Section comet = {"comet",
                   {
                       enabled(),
                       {.name = "samples_log_interval", .kind = integer, .initial = "100", .state = accepted, .range = kCount},
                       {.name = "project", .kind = string, .state = accepted},
                       {.name = "workspace", .kind = string, .state = accepted},
                       {.name = "api_key", .kind = string, .state = accepted},
                       {.name = "experiment_name", .kind = string, .state = accepted},
                       {.name = "experiment_key", .kind = string, .state = accepted},
                       {.name = "online", .kind = boolean, .state = accepted},
                       {.name = "mode", .kind = string, .state = accepted},
                   },
                   {},
                   true};
  return {tensorboard, wandb, csv, comet};
}

std::vector<Section> profilers() {
  Section comms = {"comms_logger",
                   {
                       enabled(built),
                       {.name = "verbose", .initial = "false", .note = "a line a call of deepspeed.comm"},
                       {.name = "prof_all", .initial = "true", .note = "false: only what prof_ops names"},
                       {.name = "debug", .initial = "false", .note = "the record's name has the calling function"},
                       {.name = "prof_ops", .kind = strings, .initial = "[]"},
                   },
                   {},
                   true};
  Section flops = {"flops_profiler",
                   {
                       enabled(),
                       {.name = "recompute_fwd_factor", .kind = number, .initial = "0.0", .state = accepted, .range = kNotNegative},
                       {.name = "profile_step", .kind = integer, .initial = "1", .state = accepted, .range = kNotNegative},
                       {.name = "module_depth", .kind = integer, .initial = "-1", .state = accepted, .range = {.min = -1}},
                       {.name = "top_modules", .kind = integer, .initial = "1", .state = accepted, .range = kNotNegative},
                       {.name = "detailed", .initial = "true", .state = accepted},
                       {.name = "output_file", .kind = string, .state = accepted},
                   },
                   {},
                   true};
  Section timers = {"timers", {{.name = "throughput", .kind = section}}};
  Section throughput = {"timers.throughput",
                        {
                            {.name = "enabled", .initial = "true", .state = accepted},
                            {.name = "synchronized", .initial = "true", .state = accepted},
                        }};
  return {comms, flops, timers, throughput};
}

std::vector<Section> autotuning() {
  Section main = {
      "autotuning",
      {
          enabled(),
          {.name = "fast", .initial = "true", .state = accepted},
          {.name = "results_dir", .kind = string, .initial = R"("autotuning_results")", .state = accepted},
          {.name = "exps_dir", .kind = string, .initial = R"("autotuning_exps")", .state = accepted},
          {.name = "overwrite", .initial = "true", .state = accepted},
          {.name = "start_profile_step", .kind = integer, .initial = "3", .state = accepted, .range = kNotNegative},
          {.name = "end_profile_step", .kind = integer, .initial = "5", .state = accepted, .range = kNotNegative},
          {.name = "metric",
           .kind = choice,
           .initial = R"("throughput")",
           .state = accepted,
           .accepted = R"(["latency", "throughput", "flops"])"},
          {.name = "metric_path", .kind = string, .state = accepted},
          {.name = "tuner_type",
           .kind = choice,
           .initial = R"("gridsearch")",
           .state = accepted,
           .accepted = R"(["gridsearch", "random", "model_based"])"},
          {.name = "tuner_early_stopping", .kind = integer, .initial = "5", .state = accepted, .range = kNotNegative},
          {.name = "tuner_num_trials", .kind = integer, .initial = "50", .state = accepted, .range = kNotNegative},
          {.name = "arg_mappings", .kind = object, .state = accepted},
          {.name = "model_info", .kind = section},
          {.name = "model_info_path", .kind = string, .state = accepted},
          {.name = "mp_size", .kind = integer, .initial = "1", .state = accepted, .range = kCount},
          {.name = "max_train_batch_size", .kind = integer, .state = accepted, .range = kCount},
          {.name = "min_train_batch_size", .kind = integer, .initial = "1", .state = accepted, .range = kCount},
          {.name = "max_train_micro_batch_size_per_gpu", .kind = integer, .initial = "1024", .state = accepted, .range = kCount},
          {.name = "min_train_micro_batch_size_per_gpu", .kind = integer, .initial = "1", .state = accepted, .range = kCount},
          {.name = "num_tuning_micro_batch_sizes", .kind = integer, .initial = "3", .state = accepted, .range = kCount},
      },
      {},
      true};
  Section info = {"autotuning.model_info",
                  {
                      {.name = "profile", .initial = "false", .state = accepted},
                      {.name = "num_params", .kind = integer, .state = accepted, .range = kNotNegative},
                      {.name = "hidden_size", .kind = integer, .state = accepted, .range = kCount},
                      {.name = "num_layers", .kind = integer, .state = accepted, .range = kCount},
                  },
                  {},
                  true};
  return {main, info};
}

std::vector<Section> data_sampling() {
  Section sampling = {"data_efficiency.data_sampling",
                      {
                          enabled(),
                          {.name = "num_epochs", .kind = integer, .initial = "1000", .state = accepted, .range = kCount},
                          {.name = "num_workers", .kind = integer, .initial = "0", .state = accepted, .range = kNotNegative},
                          {.name = "pin_memory", .initial = "false", .state = accepted},
                          {.name = "curriculum_learning", .kind = section},
                          {.name = "dynamic_batching", .kind = section},
                      },
                      {},
                      true};
  Section curriculum = {"data_efficiency.data_sampling.curriculum_learning",
                        {
                            enabled(),
                            {.name = "data_cluster_path", .kind = string, .state = accepted},
                            {.name = "curriculum_metrics", .kind = named_sections, .state = accepted},
                        },
                        {},
                        true};
  Section metric = {"data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*",
                    {
                        {.name = "index_to_sample_path", .kind = string, .state = accepted},
                        {.name = "index_to_metric_path", .kind = string, .state = accepted},
                        {.name = "difficulty_type", .kind = choice, .state = accepted, .accepted = R"(["value", "percentile"])"},
                        {.name = "clustering_type", .kind = string, .state = accepted},
                        {.name = "min_difficulty", .kind = number, .state = accepted},
                        {.name = "max_difficulty", .kind = number, .state = accepted},
                        {.name = "schedule_type",
                         .kind = choice,
                         .state = accepted,
                         .accepted = R"(["fixed_linear", "fixed_root", "fixed_discrete", "custom"])"},
                        {.name = "schedule_config", .kind = section},
                    },
                    {},
                    true};
  Section schedule = {"data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.schedule_config",
                      {
                          {.name = "total_curriculum_step", .kind = integer, .state = accepted, .range = kCount},
                          {.name = "difficulty_step", .kind = integer, .state = accepted, .range = kCount},
                          {.name = "root_degree", .kind = number, .state = accepted},
                          {.name = "difficulty", .kind = numbers, .state = accepted},
                          {.name = "max_step", .kind = integers, .state = accepted},
                      },
                      {},
                      true};
  Section batching = {"data_efficiency.data_sampling.dynamic_batching",
                      {
                          enabled(),
                          {.name = "max_tokens", .kind = integer, .state = accepted, .range = kCount},
                          {.name = "metrics_path", .kind = string, .state = accepted},
                          {.name = "min_batch_size", .kind = integer, .initial = "1", .state = accepted, .range = kCount},
                          {.name = "max_batch_size", .kind = integer, .state = accepted, .range = kCount},
                          {.name = "lr_scaling_method", .kind = string, .initial = R"("linear")", .state = accepted},
                          {.name = "sequence_picking_order", .kind = string, .initial = R"("dataloader")", .state = accepted},
                          {.name = "verbose", .initial = "false", .state = accepted},
                      },
                      {},
                      true};
  return {sampling, curriculum, metric, schedule, batching};
}

std::vector<Section> data_routing() {
  Section routing = {"data_efficiency.data_routing", {enabled(), {.name = "random_ltd", .kind = section}}, {}, true};
  Section ltd = {"data_efficiency.data_routing.random_ltd",
                 {
                     enabled(),
                     {.name = "total_layer_num", .kind = integer, .state = accepted, .range = kCount},
                     {.name = "random_ltd_layer_num", .kind = integer, .state = accepted, .range = kNotNegative},
                     {.name = "random_ltd_layer_id", .kind = integers, .state = accepted},
                     {.name = "model_mask_name", .kind = string, .state = accepted},
                     {.name = "model_type", .kind = string, .state = accepted},
                     {.name = "hidden_state_order", .kind = string, .state = accepted},
                     {.name = "random_ltd_schedule", .kind = section},
                     {.name = "layer_token_lr_schedule", .kind = section},
                 },
                 {},
                 true};
  Section schedule = {"data_efficiency.data_routing.random_ltd.random_ltd_schedule",
                      {
                          {.name = "min_value", .kind = integer, .state = accepted, .range = kNotNegative},
                          {.name = "max_value", .kind = integer, .state = accepted, .range = kNotNegative},
                          {.name = "schedule_type", .kind = string, .state = accepted},
                          {.name = "schedule_config", .kind = section},
                      },
                      {},
                      true};
  Section details = {"data_efficiency.data_routing.random_ltd.random_ltd_schedule.schedule_config",
                     {
                         {.name = "require_steps", .kind = integer, .state = accepted, .range = kCount},
                         {.name = "seq_per_step", .kind = integer, .state = accepted, .range = kCount},
                     },
                     {},
                     true};
  Section lr = {"data_efficiency.data_routing.random_ltd.layer_token_lr_schedule",
                {
                    enabled(),
                    {.name = "total_layer_tokens", .kind = integer, .state = accepted, .range = kCount},
                    {.name = "warmup_type", .kind = string, .state = accepted},
                    {.name = "warmup_layer_tokens", .kind = integer, .state = accepted, .range = kNotNegative},
                },
                {},
                true};
  return {routing, ltd, schedule, details, lr};
}

std::vector<Section> engines() {
  Section hybrid = {"hybrid_engine",
                    {
                        enabled(),
                        {.name = "max_out_tokens", .kind = integer, .initial = "512", .state = accepted, .range = kCount},
                        {.name = "inference_tp_size", .kind = integer, .initial = "1", .state = accepted, .range = kCount},
                        {.name = "release_inference_cache", .initial = "false", .state = accepted},
                        {.name = "pin_parameters", .initial = "true", .state = accepted},
                        {.name = "tp_gather_partition_size", .kind = integer, .initial = "8", .state = accepted, .range = kCount},
                        {.name = "enable_cuda_graph", .initial = "false", .state = accepted},
                    },
                    {},
                    true};
  Section quantization = {"weight_quantization",
                          {
                              {.name = "enabled", .initial = "false", .state = not_built},
                              {.name = "quantized_initialization", .kind = object, .initial = "{}", .state = not_built},
                              {.name = "post_init_quant", .kind = object, .initial = "{}", .state = not_built},
                              {.name = "num_bits", .kind = integer, .initial = "8", .state = accepted, .range = kCount},
                              {.name = "q_type", .kind = string, .initial = R"("symmetric")", .state = accepted},
                              {.name = "q_groups", .kind = integer, .initial = "1", .state = accepted, .range = kCount},
                          },
                          {},
                          true};
  return {hybrid, quantization};
}

}  // namespace

std::vector<Section> observe_sections() {
  Section efficiency = {"data_efficiency",
                        {
                            enabled(),
                            {.name = "seed", .kind = integer, .initial = "1234", .state = accepted},
                            {.name = "data_sampling", .kind = section},
                            {.name = "data_routing", .kind = section},
                        },
                        {},
                        true};
  std::vector<Section> sections;
  for (auto part : {monitors(), profilers(), autotuning(), std::vector<Section>{efficiency}, data_sampling(), data_routing(), engines()})
    sections.insert(sections.end(), part.begin(), part.end());
  return sections;
}

}  // namespace unshard::config
