#include "bindings.h"
#include "unshard/core/config.h"
#include "unshard/core/dtype.h"

namespace unshard::python {
namespace {

ConfigContext context_of(int world_size, bool deepspeed_defaults, std::string source) {
  ConfigContext context;
  context.world_size = world_size;
  context.deepspeed_defaults = deepspeed_defaults;
  context.source = std::move(source);
  return context;
}

const char* device_name(OffloadDevice device) {
  return device == OffloadDevice::none ? "none" : device == OffloadDevice::cpu ? "cpu" : "nvme";
}

void bind_sections(py::module_& module) {
  py::class_<BatchConfig>(module, "BatchConfig")
      .def_readonly("train_batch_size", &BatchConfig::train_batch_size)
      .def_readonly("micro_batch_size", &BatchConfig::micro_batch_size)
      .def_readonly("accumulation_steps", &BatchConfig::accumulation_steps)
      .def_readonly("micro_batch_assumed", &BatchConfig::micro_batch_assumed);
  py::class_<OptimizerConfig>(module, "OptimizerConfig")
      .def_readonly("type", &OptimizerConfig::type)
      .def_readonly("params_json", &OptimizerConfig::params_json);
  py::class_<SchedulerConfig>(module, "SchedulerConfig")
      .def_readonly("type", &SchedulerConfig::type)
      .def_readonly("params_json", &SchedulerConfig::params_json);
  py::class_<Fp16Config>(module, "Fp16Config")
      .def_readonly("enabled", &Fp16Config::enabled)
      .def_readonly("auto_cast", &Fp16Config::auto_cast)
      .def_readonly("loss_scale", &Fp16Config::loss_scale)
      .def_readonly("initial_scale_power", &Fp16Config::initial_scale_power)
      .def_readonly("loss_scale_window", &Fp16Config::loss_scale_window)
      .def_readonly("hysteresis", &Fp16Config::hysteresis)
      .def_readonly("consecutive_hysteresis", &Fp16Config::consecutive_hysteresis)
      .def_readonly("min_loss_scale", &Fp16Config::min_loss_scale);
  py::class_<Bf16Config>(module, "Bf16Config").def_readonly("enabled", &Bf16Config::enabled);
  py::class_<AutocastConfig>(module, "AutocastConfig")
      .def_readonly("enabled", &AutocastConfig::enabled)
      .def_readonly("dtype", &AutocastConfig::dtype);
  py::class_<ZeroConfig>(module, "ZeroConfig")
      .def_readonly("stage", &ZeroConfig::stage)
      .def_readonly("reduce_bucket_numel", &ZeroConfig::reduce_bucket_numel)
      .def_readonly("allgather_bucket_numel", &ZeroConfig::allgather_bucket_numel)
      .def_readonly("prefetch_bucket_numel", &ZeroConfig::prefetch_bucket_numel)
      .def_readonly("param_persistence_threshold", &ZeroConfig::param_persistence_threshold)
      .def_readonly("model_persistence_threshold", &ZeroConfig::model_persistence_threshold)
      .def_readonly("max_live_parameters", &ZeroConfig::max_live_parameters)
      .def_readonly("max_reuse_distance", &ZeroConfig::max_reuse_distance)
      .def_readonly("overlap_comm", &ZeroConfig::overlap_comm)
      .def_readonly("gather_16bit_weights_on_model_save", &ZeroConfig::gather_16bit_weights_on_model_save)
      .def_property_readonly("offload_optimizer", [](const ZeroConfig& z) { return device_name(z.offload_optimizer.device); })
      .def_property_readonly("offload_param", [](const ZeroConfig& z) { return device_name(z.offload_param.device); });
  py::class_<CheckpointConfig>(module, "CheckpointConfig")
      .def_readonly("tag_validation", &CheckpointConfig::tag_validation)
      .def_readonly("load_universal", &CheckpointConfig::load_universal)
      .def_readonly("background", &CheckpointConfig::background)
      .def_readonly("keep", &CheckpointConfig::keep);
  py::class_<UnshardConfig>(module, "UnshardConfig")
      .def_readwrite("share_memory", &UnshardConfig::share_memory)
      .def_readwrite("host", &UnshardConfig::host)
      .def_readwrite("timeout_s", &UnshardConfig::timeout_s)
      .def_readwrite("collective_check_s", &UnshardConfig::collective_check_s)
      .def_readwrite("debug", &UnshardConfig::debug)
      .def_readwrite("run_dir", &UnshardConfig::run_dir)
      .def_readwrite("timeline", &UnshardConfig::timeline);
}

}  // namespace

void bind_config(py::module_& module) {
  bind_sections(module);
  py::class_<Config>(module, "Config", "The DeepSpeed JSON, typed, validated, with the origin of every value.")
      .def_static(
          "from_file",
          [](const std::string& path, int world_size, bool deepspeed_defaults) {
            return Config::from_file(path, context_of(world_size, deepspeed_defaults, path));
          },
          py::arg("path"), py::arg("world_size") = 1, py::arg("deepspeed_defaults") = false)
      .def_static(
          "from_json",
          [](const std::string& text, int world_size, bool deepspeed_defaults, const std::string& source) {
            return Config::from_json(text, context_of(world_size, deepspeed_defaults, source));
          },
          py::arg("text"), py::arg("world_size") = 1, py::arg("deepspeed_defaults") = false, py::arg("source") = "argument")
      .def_readonly("batch", &Config::batch)
      .def_readonly("optimizer", &Config::optimizer)
      .def_readonly("scheduler", &Config::scheduler)
      .def_readonly("fp16", &Config::fp16)
      .def_readonly("bf16", &Config::bf16)
      .def_readonly("autocast", &Config::autocast)
      .def_readonly("zero", &Config::zero)
      .def_readonly("checkpoint", &Config::checkpoint)
      .def_readonly("unshard", &Config::unshard)
      .def_readonly("gradient_clipping", &Config::gradient_clipping)
      .def_readonly("gradient_clipping_defaulted", &Config::gradient_clipping_defaulted)
      .def_readonly("steps_per_print", &Config::steps_per_print)
      .def_readonly("wall_clock_breakdown", &Config::wall_clock_breakdown)
      .def_readonly("memory_breakdown", &Config::memory_breakdown)
      .def_readonly("dump_state", &Config::dump_state)
      .def_readonly("dataloader_drop_last", &Config::dataloader_drop_last)
      .def_readonly("prescale_gradients", &Config::prescale_gradients)
      .def_readonly("gradient_predivide_factor", &Config::gradient_predivide_factor)
      .def_readonly("managed_gradient_accumulation", &Config::managed_gradient_accumulation)
      .def_readonly("allreduce_mean", &Config::allreduce_mean)
      .def_readonly("communication_dtype", &Config::communication_dtype)
      .def_readonly("grad_accum_dtype", &Config::grad_accum_dtype)
      .def_readonly("buffer_dtype", &Config::buffer_dtype)
      .def("compute_dtype", &Config::compute_dtype, "dtype of the weights in forward; None: as the model has it.")
      .def("resolve_auto", &Config::resolve_auto, py::arg("hidden_size"), py::arg("largest_numel"), py::arg("total_numel"),
           py::arg("link_numel") = 0)
      .def(
          "without_optimizer",
          [](const Config& config) {
            Config result = config;
            result.optimizer = {};
            result.scheduler = {};
            return result;
          },
          "A copy for callers that bring the optimizer and move the learning rate themselves.")
      .def(
          "table",
          [](const Config& config) {
            py::list rows;
            for (const auto& row : config.table()) rows.append(py::make_tuple(row.key, row.value, row.origin));
            return rows;
          },
          "[(key, value, origin)] of every resolved key.")
      .def("to_json", &Config::to_json)
      .def("notices", &Config::notices, "Lines to say once at start.");
}

}  // namespace unshard::python
