#include "python_source.h"

#include <ATen/core/Tensor.h>

#include "checkpoint/manifest.h"
#include "unshard/core/error.h"

namespace unshard::python {

PythonSource::PythonSource(py::object object) : object_(hold(object)) {
  const auto origin = object.attr("origin").cast<std::string>();
  const auto document =
      checkpoint::parse_json(py::module_::import("json").attr("dumps")(object.attr("contents")).cast<std::string>(), origin);
  contents_ = checkpoint::read_contents(checkpoint::JsonReader(document, origin), origin);
}

at::Tensor PythonSource::read(const checkpoint::Range& range) {
  py::gil_scoped_acquire gil;
  try {
    return object_->attr("read")(range.kind, range.name, range.begin, range.end).cast<at::Tensor>();
  } catch (const std::exception& error) {  // also what Python raised; its text needs the GIL
    throw CheckpointError(cat("[checkpoint] ", contents_.origin, ": '", range.kind, "' of '", range.name, "': ", error.what()));
  }
}

}  // namespace unshard::python
