// What the inference engine, whose module knows no torch, needs of `_core`: ranks that compute one model together.
#include "bindings.h"
#include "inference/comm_peers.h"

namespace unshard::python {

void bind_inference_ranks(py::module_& module) {
  using Held = std::shared_ptr<inference::Peers>;
  module.attr("Communicator").attr("peers") = py::cpp_function(
      [](const CommHandle& self) -> py::object {
        if (self->world_size() == 1) return py::none();
        return py::capsule(new Held(inference::peers_over(self.pointer)), [](void* held) { delete static_cast<Held*>(held); });
      },
      py::is_method(module.attr("Communicator")), "What InferenceEngine takes of it: a capsule, or None for a world of one.");
  const auto engine = py::module_::import("unshard._inference");
  for (const char* name : {"InferenceEngine", "ModelError", "Overloaded"}) module.attr(name) = engine.attr(name);
}

}  // namespace unshard::python
