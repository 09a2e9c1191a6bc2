#include "bindings.h"
#include "python_optimizer.h"
#include "unshard/optim/lr_schedule.h"

namespace unshard::python {
namespace {

/// (parameter, group, param, master or None, grad), all flat.
using ItemTuple = std::tuple<int, int, at::Tensor, std::optional<at::Tensor>, at::Tensor>;

std::vector<UpdateItem> items_of(const std::vector<ItemTuple>& tuples) {
  std::vector<UpdateItem> items;
  items.reserve(tuples.size());
  for (const auto& [parameter, group, param, master, grad] : tuples) {
    items.push_back({parameter, group, param, master.value_or(at::Tensor()), grad});
  }
  return items;
}

void bind_group(py::module_& module) {
  py::class_<GroupOptions>(module, "GroupOptions", "Hyperparameters of one parameter group.")
      .def(py::init<>())
      .def_readwrite("lr", &GroupOptions::lr)
      .def_readwrite("beta1", &GroupOptions::beta1)
      .def_readwrite("beta2", &GroupOptions::beta2)
      .def_readwrite("eps", &GroupOptions::eps)
      .def_readwrite("weight_decay", &GroupOptions::weight_decay)
      .def_readwrite("momentum", &GroupOptions::momentum)
      .def_readwrite("dampening", &GroupOptions::dampening)
      .def_readwrite("lr_decay", &GroupOptions::lr_decay)
      .def_readwrite("initial_accumulator", &GroupOptions::initial_accumulator)
      .def_readwrite("min_coeff", &GroupOptions::min_coeff)
      .def_readwrite("max_coeff", &GroupOptions::max_coeff)
      .def_readwrite("eps_inside_sqrt", &GroupOptions::eps_inside_sqrt)
      .def_readwrite("nesterov", &GroupOptions::nesterov)
      .def_readwrite("bias_correction", &GroupOptions::bias_correction)
      .def_readwrite("maximize", &GroupOptions::maximize);
}

void bind_optimizer(py::module_& module) {
  py::class_<OptimizerHandle>(module, "Optimizer", "Updates flat pieces; see unshard.optim for the forms users meet.")
      .def_property_readonly("type", [](const OptimizerHandle& o) { return o->type(); })
      .def(
          "step",
          [](const OptimizerHandle& o, const std::vector<ItemTuple>& items, const std::vector<GroupOptions>& groups, double scale) {
            py::gil_scoped_release nogil;
            o->step(items_of(items), groups, UpdateScale{scale, {}});
          },
          py::arg("items"), py::arg("groups"), py::arg("scale") = 1.0)
      .def("state_names", [](const OptimizerHandle& o) { return o->state_names(); })
      .def(
          "state",
          [](const OptimizerHandle& o, int parameter, const std::string& name, const at::Tensor& like) {
            return o->state(parameter, name, like);
          },
          py::arg("parameter"), py::arg("name"), py::arg("like"))
      .def(
          "step_count", [](const OptimizerHandle& o, int parameter) { return o->step_count(parameter); }, py::arg("parameter"))
      .def(
          "set_step_count", [](const OptimizerHandle& o, int parameter, std::int64_t steps) { o->set_step_count(parameter, steps); },
          py::arg("parameter"), py::arg("steps"))
      .def("state_bytes", [](const OptimizerHandle& o) { return o->state_bytes(); });
  module.def(
      "make_optimizer",
      [](const std::string& type, bool decoupled_decay) { return OptimizerHandle(make_optimizer(type, decoupled_decay)); }, py::arg("type"),
      py::arg("decoupled_decay") = true);
  module.def(
      "python_optimizer", [](py::object client) { return OptimizerHandle(std::make_shared<PythonOptimizer>(std::move(client))); },
      py::arg("client"), "An optimizer whose update is a Python object's.");
  module.def(
      "parse_optimizer",
      [](const std::string& type, const std::string& params_json) {
        const ParsedOptimizer parsed = parse_optimizer(type, params_json);
        return py::make_tuple(parsed.type, parsed.options);
      },
      py::arg("type"), py::arg("params_json"), "(resolved type, GroupOptions) of a known optimizer's JSON.");
  module.def("is_known_optimizer", &is_known_optimizer, py::arg("type"));
}

}  // namespace

void bind_optim(py::module_& module) {
  bind_group(module);
  bind_optimizer(module);
  py::class_<LrSchedule>(module, "LrSchedule", "A schedule as a function of the number of applied updates.")
      .def_property_readonly("type", &LrSchedule::type)
      .def(
          "value",
          [](const LrSchedule& schedule, std::int64_t updates, int group, double base_lr) {
            const ScheduleValue value = schedule.value(updates, group, base_lr);
            return py::make_tuple(value.lr, value.momentum, value.second_beta);
          },
          py::arg("updates"), py::arg("group"), py::arg("base_lr"), "(lr, momentum, second beta); None: left as it is.");
  module.def("make_lr_schedule", &make_lr_schedule, py::arg("type"), py::arg("params_json"), py::arg("base_lr"), py::arg("groups"));
  module.def("is_known_lr_schedule", &is_known_lr_schedule, py::arg("type"));
}

}  // namespace unshard::python
