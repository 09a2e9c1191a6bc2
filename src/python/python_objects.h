#pragma once
// What both Python modules need: `_core`, and `_inference`, which is loaded without torch.
#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

namespace py = pybind11;

namespace unshard::python {

using NoGil = py::call_guard<py::gil_scoped_release>;

/// A Python object that C++ may copy and drop on any thread, with or without the GIL.
inline std::shared_ptr<py::object> hold(py::object object) {
  return {new py::object(std::move(object)), [](py::object* held) {
            if (!Py_IsInitialized()) return;  // the interpreter has gone, and the object with it
            py::gil_scoped_acquire gil;
            delete held;
          }};
}

}  // namespace unshard::python
