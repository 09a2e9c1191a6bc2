// How an engine starts: what all ranks must have alike is compared first, then the parameters are taken over, then everything is set aside.
#include <algorithm>
#include <bit>
#include <utility>

#include "comm/link_speed.h"
#include "engine_state.h"
#include "reducer.h"
#include "settings.h"
#include "unshard/core/error.h"
#include "unshard/core/log.h"

namespace unshard {
namespace {

StoreOptions store_options(const Config& config) {
  StoreOptions options;
  options.max_live_numel = config.zero.max_live_parameters;
  options.max_reuse_distance = config.zero.max_reuse_distance;
  options.prefetch_numel = config.zero.prefetch_bucket_numel;
  options.allgather_bucket_numel = config.zero.allgather_bucket_numel;
  options.debug = config.unshard.debug;
  return options;
}

LossScalerOptions scaler_options(const Fp16Config& fp16) {
  return {fp16.loss_scale, fp16.initial_scale_power,    fp16.loss_scale_window,
          fp16.hysteresis, fp16.consecutive_hysteresis, fp16.min_loss_scale};
}

}  // namespace

Engine::State::State(const NamedParameters& parameters, const Config& given, std::shared_ptr<Communicator> communicator,
                     EngineOptions given_options)
    : config(given), comm(std::move(communicator)), options(std::move(given_options)) {
  require(comm != nullptr, "[engine] a communicator is needed; see unshard::init_process_group()");
  accumulation_steps = config.batch.accumulation_steps;
  std::string error = model.prepare(parameters, options.groups, config.compute_dtype(), config.zero.stage, options.store.get());
  if (error.empty() && options.store && &options.store->comm() != comm.get() && options.store->comm().world_size() != comm->world_size()) {
    error = "[engine] zero.Init used another group of ranks than the engine; give both the same";
  }
  for (const auto& [name, tensor] : parameters) {
    if (!error.empty() || config.zero.stage > 0 || !options.store) break;
    const int id = options.store->find(tensor);
    if (id >= 0 && options.store->info(id).partitioned)
      error = cat("[engine] parameter '", name, "' was built partitioned (zero.Init); stage 0 keeps parameters whole: use stage 3");
  }
  const auto hosts = comm->hosts();
  if (error.empty() && config.checkpoint.use_node_local_storage && *std::max_element(hosts.begin(), hosts.end()) > 0)
    error =
        "[engine] checkpoint.use_node_local_storage = true, but the ranks are on several hosts: a checkpoint is one folder that all of "
        "them see; set it to false (Hugging Face: save_on_each_node=False) and save to storage that the hosts share";
  agree_no_error(*comm, error, "engine");
  const auto hidden = options.hidden_size > 0 ? options.hidden_size : model.hidden_size();
  if (config.any_auto()) {
    const double width = config.compute_dtype() ? 2 : 4;
    // A power of two, so that runs over one link choose alike.
    const auto in_flight = static_cast<std::uint64_t>(measure_links(*comm).bytes_in_flight() / width);
    config.resolve_auto(hidden, model.largest_numel(), model.numel(), static_cast<std::int64_t>(std::bit_floor(in_flight)));
  }
  agree_same_lines(*comm, model.describe(), "engine: comparing models", "all ranks must build the same model");
  agree_same_lines(*comm, settings_lines(config, options), "engine: comparing settings",
                   "give all ranks the same JSON, optimizer and schedule");

  store = options.store ? options.store : ParameterStore::create(comm, store_options(config));
  store->set_options(store_options(config));
  if (config.fp16.enabled) scaler.emplace(scaler_options(config.fp16));
  masters = std::make_unique<Masters>(comm->rank(), keeps_whole(), model.device());
  model.take_over(*store, *masters, config.zero);
  store->settle();
  set_up_groups();
  set_up_gradients();
  set_up_optimizer();
  apply_schedule();
  refresh_factor();
  hooks.refresh(backward);
  if (!config.unshard.timeline.empty()) open_timeline();
  set_phase(Phase::idle, "ready");
}

void Engine::State::set_up_groups() {
  std::optional<ParsedOptimizer> parsed;
  const bool from_json = !options.optimizer && !config.optimizer.type.empty();
  if (!config.optimizer.type.empty() && is_known_optimizer(config.optimizer.type)) {
    parsed = parse_optimizer(config.optimizer.type, config.optimizer.params_json);
  } else if (from_json) {
    throw ConfigError(cat("optimizer.type = \"", config.optimizer.type,
                          "\" (config): not an optimizer the library builds; pass it as EngineOptions::optimizer"));
  }
  for (const auto& group : options.groups) groups.push_back(group.options);
  if (groups.empty()) groups.push_back(parsed ? parsed->options : GroupOptions{});
  initial_groups = groups;
  if (options.optimizer) {
    optimizer = options.optimizer;
  } else if (parsed) {
    optimizer = make_optimizer(parsed->type, /*decoupled_decay=*/false);
  }
  if (!config.scheduler.type.empty()) {  // a name that isn't built in is an error: classes of torch are Python's
    schedule = make_lr_schedule(config.scheduler.type, config.scheduler.params_json, groups.front().lr, static_cast<int>(groups.size()));
  }
}

void Engine::State::set_up_gradients() {
  std::vector<PlannedParameter> planned;
  std::vector<Geometry> geometries(static_cast<std::size_t>(store->size()));
  for (const auto& parameter : model.parameters()) {
    geometries[parameter.id] = parameter.geometry;
    if (!parameter.is_trained()) continue;
    auto dtype = config.communication_dtype.value_or(parameter.dtype);
    planned.push_back({parameter.id, parameter.name, parameter.layout, dtype, parameter.active});
  }
  const auto numel = std::min(config.zero.reduce_bucket_numel, options.gradients.bucket_numel);
  plan = plan_buckets(planned, comm->world_size(), std::max<std::int64_t>(numel, comm->world_size()));
  for (std::vector<std::vector<MemberPlace>>::size_type id = plan.places.size(); id < geometries.size(); ++id) {
    plan.places.emplace_back();
    plan.span_offsets.push_back(0);
    plan.layouts.push_back(store->info(static_cast<int>(id)).layout);
  }
  const auto dtype = config.grad_accum_dtype.value_or(c10::ScalarType::Float);
  gradients = std::make_unique<Gradients>(plan, comm->rank(), keeps_whole(), dtype, model.device());
  ReducerOptions reducing;
  reducing.ring_bytes = options.gradients.ring_bytes;
  reducing.overlap = config.zero.overlap_comm;
  reducing.before_reduce = options.gradients.before_reduce;
  auto sink = [this, sums = gradients.get()](int bucket, const std::vector<at::Tensor>& slices) {
    const auto& summed = plan.buckets[bucket];
    const auto bytes = summed.slice_numel * static_cast<std::int64_t>(slices.size() * c10::elementSize(summed.dtype));
    const TimelineSpan span(comm->timeline(), Lane::bucket, "sum", summed.label, bytes);
    sums->add(bucket, slices);
  };
  pipeline = std::make_unique<GradientPipeline>(plan, *gradients, make_reducer(plan, comm, model.device(), std::move(sink), reducing),
                                                std::move(geometries));
  auto names = model.names_by_id();
  names.resize(static_cast<std::size_t>(store->size()));
  backward = std::make_shared<Backward>(*pipeline, *comm, std::move(names));
  for (const auto& parameter : model.parameters()) {
    if (!parameter.is_trained()) continue;
    hooks.watch(parameter.id, parameter.tensor);
    for (const auto& tied : parameter.tied) hooks.watch(parameter.id, tied);
  }
}

void Engine::State::set_up_optimizer() {
  if (!optimizer) return;
  std::vector<std::uint8_t> active(static_cast<std::size_t>(store->size()));
  for (const auto& parameter : model.parameters()) active[parameter.id] = parameter.active;
  optimizer->prepare(update_items(active), groups);
}

void Engine::State::apply_schedule() {
  if (!schedule) return;
  const bool has_betas = optimizer && (optimizer->type().starts_with("adam") || optimizer->type() == "lion");
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto value = schedule->value(counters.applied_updates, static_cast<int>(g), initial_groups[g].lr);
    if (value.lr) groups[g].lr = *value.lr;
    if (value.momentum && has_betas) groups[g].beta1 = *value.momentum;
    if (value.second_beta && has_betas) groups[g].beta2 = *value.second_beta;
  }
}

}  // namespace unshard
