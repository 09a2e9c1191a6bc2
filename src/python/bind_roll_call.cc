#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bindings.h"
#include "comm/own_address.h"
#include "comm/roll_call.h"

namespace unshard::python {

void bind_roll_call(py::module_& module) {
  using comm::RollCall;
  using RollHandle = Handle<RollCall>;
  const auto make = [](const py::object& store, int rank, int size, const std::string& place, double timeout_s) {
    comm::RollCallOptions options{place, std::chrono::duration<double>(timeout_s), interrupt_check()};
    return RollHandle(std::make_shared<RollCall>(shared<c10d::Store>(store), rank, size, std::move(options)));
  };
  module.def("interface_for_gloo", &comm::interface_for_gloo,
             "What GLOO_SOCKET_IFNAME must be for torch's groups to use an address that other hosts reach; empty where it is right.");
  py::class_<RollHandle>(module, "RollCall", "Ranks that get to know each other over a store: who has come, who ended, who is silent.")
      .def(py::init(make), py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("place"), py::arg("timeout_s"))
      .def(
          "exchange", [](const RollHandle& roll, const std::string& mine, const std::string& where) { return roll->exchange(mine, where); },
          py::arg("mine"), py::arg("where"), NoGil(), "Every rank's text, by rank; collective.")
      .def(
          "set_place", [](const RollHandle& roll, const std::string& where) { roll->set_place(where); }, py::arg("where"), NoGil())
      .def(
          "check", [](const RollHandle& roll) { roll->check(); }, NoGil(), "Raises CommError when a rank ended or gave up.")
      .def(
          "explain", [](const RollHandle& roll) { return roll->explain(); }, NoGil(), "check() after a moment, else who is missing.")
      .def(
          "fail", [](const RollHandle& roll, const std::string& why) { roll->fail(why); }, py::arg("why"), NoGil(),
          "Tell the others why this rank gives up.")
      .def(
          "finish", [](const RollHandle& roll) { roll->finish(); }, NoGil(), "Collective; from here on ranks may end.");
}

}  // namespace unshard::python
