// Which key is which member of Config, said once; reading, showing and comparing go through this list.
#include "core/config_internal.h"
#include "unshard/core/dtype.h"

namespace unshard::config {
namespace {

/// A bool that the JSON writes as one of two words (or as a bool).
template <class Bool>
struct Words {
  Bool& value;
  const char* if_true;
  const char* if_false;
};
template <class Bool>
Words(Bool&, const char*, const char*) -> Words<Bool>;

template <class C, class F>
void general_fields(C& c, F&& field) {
  field("train_batch_size", c.batch.train_batch_size);
  field("train_micro_batch_size_per_gpu", c.batch.micro_batch_size);
  field("gradient_accumulation_steps", c.batch.accumulation_steps);
  field("managed_gradient_accumulation", c.managed_gradient_accumulation);
  field("steps_per_print", c.steps_per_print);
  field("dump_state", c.dump_state);
  field("wall_clock_breakdown", c.wall_clock_breakdown);
  field("memory_breakdown", c.memory_breakdown);
  field("dataloader_drop_last", c.dataloader_drop_last);
  field("gradient_clipping", c.gradient_clipping);
  field("prescale_gradients", c.prescale_gradients);
  field("gradient_predivide_factor", c.gradient_predivide_factor);
  field("gradient_allreduce_op", Words{c.allreduce_mean, "mean", "sum"});
  field("communication_data_type", c.communication_dtype);
  field("data_types.grad_accum_dtype", c.grad_accum_dtype);
  field("data_types.param_dtype", c.param_dtype);
  field("data_types.buffer_dtype", c.buffer_dtype);
  field("optimizer.type", c.optimizer.type);
  field("scheduler.type", c.scheduler.type);
  field("torch_autocast.enabled", c.autocast.enabled);
  field("torch_autocast.dtype", c.autocast.dtype);
  field("checkpoint.tag_validation", c.checkpoint.tag_validation);
  field("checkpoint.load_universal", c.checkpoint.load_universal);
  field("checkpoint.use_node_local_storage", c.checkpoint.use_node_local_storage);
  field("checkpoint.writer.decoupled", c.checkpoint.decoupled);
  field("unshard.checkpoint.async", c.checkpoint.background);
  field("unshard.checkpoint.keep", c.checkpoint.keep);
  field("unshard.share_memory", Words{c.unshard.share_memory, "auto", "off"});
  field("unshard.host", c.unshard.host);
  field("unshard.timeout_s", c.unshard.timeout_s);
  field("unshard.collective_check_s", c.unshard.collective_check_s);
  field("unshard.debug", c.unshard.debug);
  field("unshard.run_dir", c.unshard.run_dir);
  field("unshard.timeline", c.unshard.timeline);
}

template <class C, class F>
void precision_fields(C& c, F&& field) {
  field("fp16.enabled", c.fp16.enabled);
  field("fp16.auto_cast", c.fp16.auto_cast);
  field("fp16.loss_scale", c.fp16.loss_scale);
  field("fp16.initial_scale_power", c.fp16.initial_scale_power);
  field("fp16.loss_scale_window", c.fp16.loss_scale_window);
  field("fp16.hysteresis", c.fp16.hysteresis);
  field("fp16.consecutive_hysteresis", c.fp16.consecutive_hysteresis);
  field("fp16.min_loss_scale", c.fp16.min_loss_scale);
  field("bf16.enabled", c.bf16.enabled);
  field("bf16.check_grad_overflow", c.bf16.check_grad_overflow);
}

template <class C, class F>
void zero_fields(C& c, F&& field) {
  field("zero_optimization.stage", c.zero.stage);
  field("zero_optimization.contiguous_gradients", c.zero.contiguous_gradients);
  field("zero_optimization.reduce_scatter", c.zero.reduce_scatter);
  field("zero_optimization.reduce_bucket_size", c.zero.reduce_bucket_numel);
  field("zero_optimization.allgather_partitions", c.zero.allgather_partitions);
  field("zero_optimization.allgather_bucket_size", c.zero.allgather_bucket_numel);
  field("zero_optimization.overlap_comm", c.zero.overlap_comm);
  field("zero_optimization.sub_group_size", c.zero.sub_group_size);
  field("zero_optimization.prefetch_bucket_size", c.zero.prefetch_bucket_numel);
  field("zero_optimization.param_persistence_threshold", c.zero.param_persistence_threshold);
  field("zero_optimization.model_persistence_threshold", c.zero.model_persistence_threshold);
  field("zero_optimization.max_live_parameters", c.zero.max_live_parameters);
  field("zero_optimization.max_reuse_distance", c.zero.max_reuse_distance);
  field("zero_optimization.gather_16bit_weights_on_model_save", c.zero.gather_16bit_weights_on_model_save);
  field("zero_optimization.offload_optimizer.device", c.zero.offload_optimizer.device);
  field("zero_optimization.offload_optimizer.pin_memory", c.zero.offload_optimizer.pin_memory);
  field("zero_optimization.offload_param.device", c.zero.offload_param.device);
  field("zero_optimization.offload_param.pin_memory", c.zero.offload_param.pin_memory);
}

template <class C, class F>
void all_fields(C& c, F&& field) {
  general_fields(c, field);
  precision_fields(c, field);
  zero_fields(c, field);
}

constexpr const char* kDevices[] = {"none", "cpu", "nvme"};  // in the order of OffloadDevice

void read(const Json& json, bool& value) { value = json.get<bool>(); }
void read(const Json& json, int& value) { value = json.get<int>(); }
void read(const Json& json, std::int64_t& value) { value = json.get<std::int64_t>(); }
void read(const Json& json, double& value) { value = json.get<double>(); }
void read(const Json& json, std::string& value) { value = json.get<std::string>(); }
void read(const Json& json, std::optional<c10::ScalarType>& value) { value = parse_dtype(json.get<std::string>()); }
void read(const Json& json, std::optional<std::int64_t>& value) {
  value = json.is_number() ? std::optional(json.get<std::int64_t>()) : std::nullopt;  // "Infinity": never
}
void read(const Json& json, OffloadDevice& value) {
  for (int i = 0; i < 3; ++i)
    if (json == kDevices[i]) value = static_cast<OffloadDevice>(i);
}
void read(const Json& json, Words<bool> words) { words.value = json.is_boolean() ? json.get<bool>() : json == words.if_true; }

template <class T>
Json write(const T& value) {
  return value;
}
Json write(OffloadDevice value) { return kDevices[static_cast<int>(value)]; }
Json write(const std::optional<c10::ScalarType>& value) { return value ? Json(dtype_name(*value)) : Json(nullptr); }
Json write(const std::optional<std::int64_t>& value) { return value ? Json(*value) : Json(nullptr); }
Json write(Words<const bool> words) { return words.value ? words.if_true : words.if_false; }

}  // namespace

void load_fields(Config& config, const Checked& checked) {
  all_fields(config, [&](std::string_view path, auto&& member) {
    if (const Entry* entry = checked.find(path)) read(entry->value, member);
  });
  config.checkpoint.background = config.checkpoint.background || config.checkpoint.decoupled;
  config.optimizer.params_json = checked.optimizer_params;
  config.scheduler.params_json = checked.scheduler_params;
  if (const NamedType* type = find_type("scheduler", config.scheduler.type)) config.scheduler.type = type->name;
  config.zero.reduce_bucket_auto = checked.is_auto("zero_optimization.reduce_bucket_size");
  config.zero.prefetch_bucket_auto = checked.is_auto("zero_optimization.prefetch_bucket_size");
  config.zero.persistence_threshold_auto = checked.is_auto("zero_optimization.param_persistence_threshold");
}

FieldValues field_values(const Config& config) {
  FieldValues values;
  all_fields(config, [&](std::string_view path, auto&& member) { values.emplace(path, write(member)); });
  return values;
}

}  // namespace unshard::config
