#include <pybind11/stl.h>

#include "python_objects.h"
#include "unshard/inference/embedder.h"

namespace unshard::python {
namespace {

using inference::EmbedderOptions;
using inference::Token;

py::bytes bytes_of(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

py::dict info_dict(const inference::EmbedderInfo& info) {
  using namespace py::literals;
  return py::dict("family"_a = info.family, "dtype"_a = info.dtype, "pooling"_a = info.pooling, "normalised"_a = info.normalised,
                  "vocab"_a = info.vocab, "layers"_a = info.layers, "hidden"_a = info.hidden, "context"_a = info.context,
                  "parameters"_a = info.parameters, "weight_bytes"_a = info.weight_bytes, "shorter"_a = info.shorter);
}

}  // namespace

void bind_embedder(py::module_& module) {
  using inference::Embedder;
  py::class_<Embedder, std::shared_ptr<Embedder>>(module, "InferenceEmbedder",
                                                  "Texts' tokens to vectors, by an encoder. `unshard.Embedder` is its Python form.")
      .def(py::init([](const std::string& path, const std::string& dtype, std::int64_t threads, std::int64_t batch_tokens,
                       std::int64_t max_context) {
             return std::make_shared<Embedder>(path, EmbedderOptions{dtype, threads, batch_tokens, max_context});
           }),
           NoGil(), py::arg("path"), py::kw_only(), py::arg("dtype") = "auto", py::arg("threads") = 0, py::arg("batch_tokens") = 0,
           py::arg("max_context") = 0)
      .def_static("takes", &Embedder::takes, NoGil(), py::arg("path"), "Is this the folder of an encoder whose family is built?")
      .def("model", [](const Embedder& self) { return info_dict(self.model()); })
      .def(
          "embed",
          [](Embedder& self, const std::vector<std::vector<Token>>& texts) {
            std::vector<float> vectors;
            {
              py::gil_scoped_release nogil;
              vectors = self.embed(texts);
            }
            return bytes_of(vectors);
          },
          py::arg("texts"), "Vectors of lists of tokens: float32 bytes of [texts, hidden].")
      .def(
          "hidden_states",
          [](Embedder& self, const std::vector<Token>& text) {
            std::vector<float> rows;
            {
              py::gil_scoped_release nogil;
              rows = self.hidden_states(text);
            }
            return bytes_of(rows);
          },
          py::arg("text"), "The last layer's rows, before pooling: float32 bytes of [tokens, hidden].");
}

}  // namespace unshard::python
