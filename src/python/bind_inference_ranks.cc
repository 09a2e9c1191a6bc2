// What the inference engine, whose module knows no torch, needs of `_core`: ranks that compute one model together, and models on other
// devices.
#include "bindings.h"
#include "inference/comm_peers.h"
#include "unshard/inference/torch_models.h"

namespace unshard::python {

void bind_inference_ranks(py::module_& module) {
  using Held = std::shared_ptr<inference::Peers>;
  module.attr("Communicator").attr("peers") = py::cpp_function(
      [](const CommHandle& self) -> py::object {
        if (self->world_size() == 1) return py::none();
        return py::capsule(new Held(inference::peers_over(self.pointer)), [](void* held) { delete static_cast<Held*>(held); });
      },
      py::is_method(module.attr("Communicator")), "What InferenceEngine takes of it: a capsule, or None for a world of one.");
  using inference::ModelFactory;
  module.def(
      "torch_models",
      [] { return py::capsule(new ModelFactory(inference::torch_models()), [](void* held) { delete static_cast<ModelFactory*>(held); }); },
      "What InferenceEngine computes with on devices but \"cpu\": a capsule.");
  const auto engine = py::module_::import("unshard._inference");
  for (const char* name : {"InferenceEngine", "InferenceEmbedder", "ModelError", "Overloaded"}) module.attr(name) = engine.attr(name);
}

}  // namespace unshard::python
