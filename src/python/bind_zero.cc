#include <ATen/core/Tensor.h>

#include "bindings.h"

namespace unshard::python {
namespace {

py::dict info_dict(const ParameterStore& store, int id) {
  const ParameterInfo& info = store.info(id);
  py::dict result;
  result["id"] = info.id;
  result["name"] = info.name;
  result["sizes"] = info.sizes;
  result["numel"] = info.layout.numel;
  result["shard_numel"] = info.layout.shard_numel();
  result["partitioned"] = info.partitioned;
  return result;
}

py::dict stats_dict(const ParameterStore& store) {
  const ResidencyStats stats = store.stats();
  py::dict result;
  result["touches"] = stats.touches;
  result["gathers"] = stats.gathers;
  result["prefetched"] = stats.prefetched;
  result["live_bytes"] = stats.live_bytes;
  result["peak_live_bytes"] = stats.peak_live_bytes;
  result["pinned"] = stats.pinned;
  result["exposed_wait_ms"] = stats.exposed_wait_ms;
  result["link_bytes"] = stats.link_bytes;
  result["outside_plan"] = stats.outside_plan;
  result["let_go_early"] = stats.let_go_early;
  result["host_live_bytes"] = stats.host_live_bytes;
  result["host_peak_live_bytes"] = stats.host_peak_live_bytes;
  return result;
}

void bind_values(py::class_<StoreHandle>& cls) {
  cls.def(
         "own_slice", [](const StoreHandle& s, int id) { return s->own_slice(id); }, py::arg("id"), NoGil())
      .def(
          "whole_if_local", [](const StoreHandle& s, int id) { return s->whole_if_local(id); }, py::arg("id"), NoGil())
      .def(
          "settle", [](const StoreHandle& s) { return s->settle(); }, NoGil())
      .def(
          "check_storages", [](const StoreHandle& s) { s->check_storages(); }, NoGil())
      .def(
          "publish_one", [](const StoreHandle& s, int id) { s->publish_one(id); }, py::arg("id"), NoGil())
      .def(
          "pin", [](const StoreHandle& s, const std::vector<int>& ids) { s->pin(ids); }, py::arg("ids"), NoGil())
      .def(
          "unpin", [](const StoreHandle& s, const std::vector<int>& ids) { s->unpin(ids); }, py::arg("ids"), NoGil())
      .def(
          "begin_edit", [](const StoreHandle& s, const std::vector<int>& ids) { s->begin_edit(ids); }, py::arg("ids"), NoGil())
      .def(
          "end_edit", [](const StoreHandle& s, const std::vector<int>& ids, int modifier) { s->end_edit(ids, modifier); }, py::arg("ids"),
          py::arg("modifier"), NoGil())
      .def(
          "enter_inference", [](const StoreHandle& s) { s->enter_inference(); }, NoGil())
      .def(
          "leave_inference", [](const StoreHandle& s) { s->leave_inference(); }, NoGil())
      .def(
          "release_gathered", [](const StoreHandle& s) { s->release_gathered(); }, NoGil())
      .def(
          "set_lockstep_writes", [](const StoreHandle& s, bool on) { s->set_lockstep_writes(on); }, py::arg("on"), NoGil())
      .def(
          "release_all", [](const StoreHandle& s) { s->release_all(); }, NoGil());
}

}  // namespace

void bind_zero(py::module_& module) {
  py::class_<StoreHandle> cls(module, "ParameterStore", "Where a model's parameters rest on this rank.");
  cls.def(py::init([](const CommHandle& comm, std::int64_t max_live_numel, std::int64_t prefetch_numel, bool debug) {
            StoreOptions options;
            options.max_live_numel = max_live_numel;
            options.prefetch_numel = prefetch_numel;
            options.debug = debug;
            py::gil_scoped_release nogil;
            return StoreHandle(ParameterStore::create(comm.pointer, options));
          }),
          py::arg("comm"), py::arg("max_live_numel") = 1'000'000'000, py::arg("prefetch_numel") = 50'000'000, py::arg("debug") = false)
      .def(
          "add",
          [](const StoreHandle& s, const at::Tensor& p, const std::string& name, bool partitioned) { return s->add(p, name, partitioned); },
          py::arg("parameter"), py::arg("name"), py::arg("partitioned"), NoGil())
      .def(
          "rename", [](const StoreHandle& s, int id, const std::string& name) { s->rename(id, name); }, py::arg("id"), py::arg("name"))
      .def(
          "find", [](const StoreHandle& s, const at::Tensor& tensor) { return s->find(tensor); }, py::arg("tensor"))
      .def(
          "info", [](const StoreHandle& s, int id) { return info_dict(*s, id); }, py::arg("id"))
      .def(
          "parameter", [](const StoreHandle& s, int id) { return s->parameter(id); }, py::arg("id"))
      .def("stats", [](const StoreHandle& s) { return stats_dict(*s); })
      .def("reset_peak", [](const StoreHandle& s) { s->reset_peak(); })
      .def("bytes", [](const StoreHandle& s) { return py::make_tuple(s->bytes().parameters, s->bytes().padding); })
      .def_property_readonly("shares_memory", [](const StoreHandle& s) { return s->shares_memory(); })
      .def_property_readonly("comm",
                             [](const StoreHandle& s) {
                               return CommHandle(std::shared_ptr<Communicator>(s.pointer, &s->comm()));  // alive as long as the store is
                             })
      .def_property_readonly("rank", [](const StoreHandle& s) { return s->comm().rank(); })
      .def_property_readonly("world_size", [](const StoreHandle& s) { return s->comm().world_size(); })
      .def(
          "broadcast", [](const StoreHandle& s, at::Tensor tensor, int root) { s->comm().broadcast(tensor, root); }, py::arg("tensor"),
          py::arg("root"), NoGil())
      .def(
          "check_all_in", [](const StoreHandle& s, const std::string& call) { s->comm().check_all_in(call); }, py::arg("call"), NoGil())
      .def("__len__", [](const StoreHandle& s) { return s->size(); })
      .def("__eq__",
           [](const StoreHandle& s, const py::object& other) {
             return py::isinstance<StoreHandle>(other) && other.cast<StoreHandle&>().pointer == s.pointer;
           })
      .def("__hash__", [](const StoreHandle& s) { return std::hash<const void*>()(s.pointer.get()); });
  bind_values(cls);
  module.def(
      "store_of",
      [](const at::Tensor& tensor) -> py::object {
        int id = -1;
        auto store = store_of(tensor, &id);
        return store ? py::make_tuple(StoreHandle(std::move(store)), id) : py::object(py::none());
      },
      py::arg("tensor"), "(store, id) of the parameter whose storage this tensor has, or None.");
}

}  // namespace unshard::python
