#include <ATen/core/Tensor.h>

#include "bindings.h"
#include "unshard/engine/engine.h"

namespace unshard::python {
namespace {

using GroupTuple = std::pair<std::vector<std::string>, GroupOptions>;

EngineHandle make_engine(const NamedParameters& parameters, const Config& config, const CommHandle& comm,
                         const std::optional<std::vector<GroupTuple>>& groups, const OptimizerHandle* optimizer, const StoreHandle* store,
                         const py::object& source, std::int64_t hidden_size, const std::string& name,
                         const std::vector<std::string>& alike) {
  EngineOptions options;
  if (groups) {
    for (const auto& [names, hyper] : *groups) options.groups.push_back({names, hyper});
  }
  if (optimizer != nullptr) options.optimizer = optimizer->pointer;
  if (store != nullptr) options.store = store->pointer;
  if (!source.is_none()) {
    options.source = [held = hold(source)] {
      py::gil_scoped_acquire gil;
      return (*held)().cast<NamedParameters>();
    };
  }
  options.hidden_size = hidden_size;
  options.name = name;
  options.alike = alike;
  auto shared_comm = comm.pointer;
  py::gil_scoped_release nogil;
  return EngineHandle(std::make_shared<Engine>(parameters, config, std::move(shared_comm), std::move(options)));
}

void bind_training(py::class_<EngineHandle>& cls) {
  cls.def(
         "begin_forward", [](const EngineHandle& e) { e->begin_forward(); }, NoGil())
      .def(
          "end_forward", [](const EngineHandle& e) { e->end_forward(); }, NoGil())
      .def(
          "scale", [](const EngineHandle& e, const at::Tensor& loss, bool gas) { return e->scale(loss, gas); }, py::arg("loss"),
          py::arg("scale_wrt_gas") = true, NoGil())
      .def(
          "backward",
          [](const EngineHandle& e, const at::Tensor& loss, bool retain_graph, bool gas) { return e->backward(loss, retain_graph, gas); },
          py::arg("loss"), py::arg("retain_graph") = false, py::arg("scale_wrt_gas") = true, NoGil())
      .def(
          "step", [](const EngineHandle& e) { e->step(); }, NoGil())
      .def(
          "zero_grad", [](const EngineHandle& e) { e->zero_grad(); }, NoGil())
      .def("is_gradient_accumulation_boundary", [](const EngineHandle& e) { return e->is_gradient_accumulation_boundary(); })
      .def(
          "set_gradient_accumulation_boundary",
          [](const EngineHandle& e, std::optional<bool> value) { e->set_gradient_accumulation_boundary(value); }, py::arg("value"))
      .def(
          "set_accumulation_steps", [](const EngineHandle& e, std::int64_t steps) { e->set_accumulation_steps(steps); }, py::arg("steps"))
      .def(
          "set_micro_batch_size", [](const EngineHandle& e, std::int64_t samples) { e->set_micro_batch_size(samples); }, py::arg("samples"))
      .def(
          "set_no_sync", [](const EngineHandle& e, bool on) { e->set_no_sync(on); }, py::arg("on"), NoGil())
      .def(
          "compute_grad_norm", [](const EngineHandle& e) { return e->compute_grad_norm(); }, NoGil())
      .def("last_grad_norm", [](const EngineHandle& e) { return e->last_grad_norm(); })
      .def("was_step_applied", [](const EngineHandle& e) { return e->was_step_applied(); })
      .def("overflow", [](const EngineHandle& e) { return e->overflow(); })
      .def("loss_scale", [](const EngineHandle& e) { return e->loss_scale(); })
      .def_property_readonly("micro_steps", [](const EngineHandle& e) { return e->micro_steps(); })
      .def_property_readonly("global_steps", [](const EngineHandle& e) { return e->global_steps(); })
      .def_property_readonly("global_samples", [](const EngineHandle& e) { return e->global_samples(); })
      .def_property_readonly("skipped_steps", [](const EngineHandle& e) { return e->skipped_steps(); })
      .def_property_readonly("applied_updates", [](const EngineHandle& e) { return e->applied_updates(); })
      .def(
          "set_group", [](const EngineHandle& e, std::size_t index, const GroupOptions& options) { e->groups().at(index) = options; },
          py::arg("index"), py::arg("options"));
}

void bind_tensors(py::class_<EngineHandle>& cls) {
  cls.def(
         "full_fp32_param", [](const EngineHandle& e, int id) { return e->full_fp32_param(id); }, py::arg("id"), NoGil())
      .def(
          "full_grad", [](const EngineHandle& e, int id) { return e->full_grad(id); }, py::arg("id"), NoGil())
      .def(
          "full_state", [](const EngineHandle& e, int id, const std::string& name) { return e->full_state(id, name); }, py::arg("id"),
          py::arg("name"), NoGil())
      .def(
          "set_full_fp32_param", [](const EngineHandle& e, int id, const at::Tensor& value) { e->set_full_fp32_param(id, value); },
          py::arg("id"), py::arg("value"), NoGil())
      .def(
          "set_full_grad", [](const EngineHandle& e, int id, const at::Tensor& value) { e->set_full_grad(id, value); }, py::arg("id"),
          py::arg("value"), NoGil())
      .def(
          "set_full_state",
          [](const EngineHandle& e, int id, const std::string& name, const at::Tensor& value) { e->set_full_state(id, name, value); },
          py::arg("id"), py::arg("name"), py::arg("value"), NoGil())
      .def(
          "set_local_fp32_param", [](const EngineHandle& e, int id, const at::Tensor& value) { e->set_local_fp32_param(id, value); },
          py::arg("id"), py::arg("value"), NoGil())
      .def(
          "set_local_grad", [](const EngineHandle& e, int id, const at::Tensor& value) { e->set_local_grad(id, value); }, py::arg("id"),
          py::arg("value"), NoGil())
      .def(
          "set_local_state",
          [](const EngineHandle& e, int id, const std::string& name, const at::Tensor& value) { e->set_local_state(id, name, value); },
          py::arg("id"), py::arg("name"), py::arg("value"), NoGil())
      .def(
          "local_fp32_param", [](const EngineHandle& e, int id) { return e->local_fp32_param(id); }, py::arg("id"), NoGil())
      .def(
          "local_grad", [](const EngineHandle& e, int id) { return e->local_grad(id); }, py::arg("id"), NoGil())
      .def(
          "local_state", [](const EngineHandle& e, int id, const std::string& name) { return e->local_state(id, name); }, py::arg("id"),
          py::arg("name"), NoGil());
}

void bind_reports(py::class_<EngineHandle>& cls) {
  cls.def(
         "memory",
         [](const EngineHandle& e) {
           const MemoryReport m = e->memory();
           py::dict result;
           result["parameters"] = m.parameters;
           result["gradients"] = m.gradients;
           result["optimizer"] = m.optimizer;
           result["buckets"] = m.buckets;
           result["gathered"] = m.gathered;
           result["padding"] = m.padding;
           result["formula"] = m.formula;
           return result;
         },
         "Bytes of model state on this rank by kind.")
      .def(
          "times",
          [](const EngineHandle& e) {
            const StepTimes t = e->times();
            py::dict result;
            result["forward_ms"] = t.forward_ms;
            result["backward_ms"] = t.backward_ms;
            result["reduce_wait_ms"] = t.reduce_wait_ms;
            result["update_ms"] = t.update_ms;
            result["publish_ms"] = t.publish_ms;
            result["step_ms"] = t.step_ms;
            return result;
          },
          "Wall time of the last step's parts, ms.")
      .def("dtype_table", [](const EngineHandle& e) { return e->dtype_table(); });
}

}  // namespace

void bind_engine(py::module_& module) {
  py::class_<EngineHandle> cls(module, "Engine", "The training engine; unshard.Engine is its Python face.");
  cls.def(py::init(&make_engine), py::arg("parameters"), py::arg("config"), py::arg("comm"), py::arg("groups") = py::none(),
          py::arg("optimizer") = py::none(), py::arg("store") = py::none(), py::arg("source") = py::none(), py::arg("hidden_size") = 0,
          py::arg("name") = "", py::arg("alike") = std::vector<std::string>{})
      .def_property_readonly("config", [](const EngineHandle& e) { return Config(e->config()); })
      .def_property_readonly("store", [](const EngineHandle& e) { return StoreHandle(e->shared_store()); })
      .def(
          "enter_inference", [](const EngineHandle& e) { e->enter_inference(); }, NoGil())
      .def(
          "leave_inference", [](const EngineHandle& e) { e->leave_inference(); }, NoGil())
      .def(
          "offload_states",
          [](const EngineHandle& e, const std::vector<std::string>& include, const std::string& device) {
            e->offload_states(include, device);
          },
          py::arg("include") = std::vector<std::string>{}, py::arg("device") = "cpu", NoGil())
      .def(
          "reload_states", [](const EngineHandle& e) { e->reload_states(); }, NoGil())
      .def(
          "close_timeline", [](const EngineHandle& e) { e->close_timeline(); }, NoGil())
      .def_property_readonly("writes_timeline", [](const EngineHandle& e) { return e->writes_timeline(); })
      .def(
          "destroy", [](const EngineHandle& e) { e->destroy(); }, NoGil());
  bind_training(cls);
  bind_tensors(cls);
  bind_reports(cls);
  bind_checkpoint(module, cls);
}

}  // namespace unshard::python
