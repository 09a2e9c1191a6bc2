// The Python module `_inference`: the inference engine alone, so that a server starts without loading torch.
#include "python_objects.h"

namespace unshard::python {
void bind_inference(py::module_& module);
void bind_embedder(py::module_& module);
}  // namespace unshard::python

PYBIND11_MODULE(_inference, module) {
  module.doc() = "Binding of Unshard's inference engine. Use `unshard.LLM`, `unshard.Embedder`, or `unshard serve`.";
  unshard::python::bind_inference(module);
  unshard::python::bind_embedder(module);
}
