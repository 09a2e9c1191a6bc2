#include <torch/csrc/Exceptions.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bindings.h"
#include "unshard/comm/departure.h"
#include "unshard/core/error.h"

namespace unshard::python {

std::function<void()> interrupt_check() {
  const auto main = py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
  return [main] {
    if (!Py_IsInitialized() || PyThread_get_thread_ident() != main) return;
    py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() == 0) return;
    python_error error;  // the form that both torch's and our translators hand back to Python
    error.persist();
    // What the other ranks are told. (Ctrl-C's exception has no value, for which torch puts a word of its own, or an empty one.)
    const std::string name = reinterpret_cast<PyTypeObject*>(error.type)->tp_name;
    error.message = !error.value || error.message.empty() ? name : cat(name, ": ", error.message);
    throw error;  // NOLINT(misc-throw-by-value-catch-by-reference)
  };
}

namespace {

CommOptions options_of(bool share_memory, double timeout_s, double collective_check_s, const RecordHandle* record,
                       const std::string& host = {}) {
  CommOptions options;
  options.host_name = host;
  options.share_memory = share_memory;
  options.timeout = std::chrono::duration<double>(timeout_s);
  options.collective_check = std::chrono::duration<double>(collective_check_s);
  options.interrupt_check = interrupt_check();
  if (record) options.record = record->pointer;
  return options;
}

ReduceOp reduce_op(const std::string& name) {
  require(name == "sum" || name == "max" || name == "min", "[comm] reduction '", name, "' is unknown; use sum, max or min");
  return name == "sum" ? ReduceOp::sum : name == "max" ? ReduceOp::max : ReduceOp::min;
}

CommHandle over_group(const py::object& group, const py::object& store, bool share_memory, double timeout_s, double collective_check_s,
                      const std::string& host, const RecordHandle* record) {
  auto c_group = shared<c10d::ProcessGroup>(group);
  auto c_store = shared<c10d::Store>(store);
  const auto options = options_of(share_memory, timeout_s, collective_check_s, record, host);
  py::gil_scoped_release nogil;
  return CommHandle(make_communicator(std::move(c_group), std::move(c_store), options));
}

void bind_factories(py::module_& module) {
  module.def("make_communicator", &over_group, py::arg("group"), py::arg("store"), py::arg("share_memory") = true,
             py::arg("timeout_s") = 1800.0, py::arg("collective_check_s") = 60.0, py::arg("host") = "", py::arg("record") = nullptr,
             "Communicator over a torch.distributed group; collective.");
  module.def(
      "single_process_communicator",
      [](double timeout_s, const RecordHandle* record) {
        return CommHandle(single_process_communicator(options_of(true, timeout_s, 60, record)));
      },
      py::arg("timeout_s") = 1800.0, py::arg("record") = nullptr, "A world of one.");
}

}  // namespace

void bind_comm(py::module_& module) {
  py::class_<CommHandle>(module, "Communicator", "A group of ranks; its calls are collective.")
      .def_property_readonly("rank", [](const CommHandle& c) { return c->rank(); })
      .def_property_readonly("world_size", [](const CommHandle& c) { return c->world_size(); })
      .def_property_readonly("shares_memory", [](const CommHandle& c) { return c->host() != nullptr; })
      .def_property_readonly(
          "hosts", [](const CommHandle& c) { return c->hosts(); }, "The number of each rank's host, by rank.")
      .def(
          "all_gather", [](const CommHandle& c, at::Tensor output, const at::Tensor& input) { c->all_gather(output, input); },
          py::arg("output"), py::arg("input"), NoGil())
      .def(
          "reduce_scatter",
          [](const CommHandle& c, at::Tensor output, const at::Tensor& input, const std::string& op) {
            c->reduce_scatter(output, input, reduce_op(op));
          },
          py::arg("output"), py::arg("input"), py::arg("op") = "sum", NoGil())
      .def(
          "all_reduce", [](const CommHandle& c, at::Tensor tensor, const std::string& op) { c->all_reduce(tensor, reduce_op(op)); },
          py::arg("tensor"), py::arg("op") = "sum", NoGil())
      .def(
          "broadcast", [](const CommHandle& c, at::Tensor tensor, int root) { c->broadcast(tensor, root); }, py::arg("tensor"),
          py::arg("root"), NoGil())
      .def(
          "all_to_all", [](const CommHandle& c, at::Tensor output, const at::Tensor& input) { c->all_to_all(output, input); },
          py::arg("output"), py::arg("input"), NoGil())
      .def(
          "send", [](const CommHandle& c, const at::Tensor& tensor, int to, int tag) { c->send(tensor, to, tag); }, py::arg("tensor"),
          py::arg("destination"), py::arg("tag") = 0, NoGil())
      .def(
          "recv", [](const CommHandle& c, at::Tensor tensor, int from, int tag) { c->recv(tensor, from, tag); }, py::arg("tensor"),
          py::arg("source"), py::arg("tag") = 0, NoGil())
      .def(
          "barrier", [](const CommHandle& c, const std::string& where) { c->barrier(where); }, py::arg("where") = "", NoGil())
      .def(
          "all_gather_strings", [](const CommHandle& c, const std::string& mine) { return c->all_gather_strings(mine); }, py::arg("mine"),
          NoGil())
      .def(
          "check_all_in", [](const CommHandle& c, const std::string& call) { c->check_all_in(call); }, py::arg("call"), NoGil())
      .def(
          "counts",
          [](const CommHandle& c) {
            py::dict result;
            for (const auto& [op, count] : c->counts()) result[py::str(op)] = py::make_tuple(count.calls, count.bytes);
            return result;
          },
          "{operation: (calls, bytes)} since creation or reset_counts().")
      .def(
          "set_departure", [](const CommHandle& c, const std::string& why) { set_departure(*c, why); }, py::arg("why"),
          "Why this rank is about to let go of the group: ranks that still wait for it are told.")
      .def("reset_counts", [](const CommHandle& c) { c->reset_counts(); })
      .def(
          "flight_record", [](const CommHandle& c, std::size_t last) { return c->recorder().to_text(last); }, py::arg("last") = 16,
          "The last collectives of this rank, as text.");
  bind_factories(module);
}

}  // namespace unshard::python
