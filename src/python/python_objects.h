#pragma once
// What both Python modules need: `_core`, and `_inference`, which is loaded without torch.
#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

namespace py = pybind11;

namespace unshard::python {

using NoGil = py::call_guard<py::gil_scoped_release>;

/// Whether this thread can no longer ask for the GIL: Python ends a thread that does, and with it the process.
inline bool python_has_ended() { return !Py_IsInitialized() || (_Py_IsFinalizing() && !PyGILState_Check()); }

/// A Python object that C++ may copy and drop on any thread, with or without the GIL.
inline std::shared_ptr<py::object> hold(py::object object) {
  return {new py::object(std::move(object)), [](py::object* held) {
            if (python_has_ended()) return;  // and the object with it
            py::gil_scoped_acquire gil;
            delete held;
          }};
}

}  // namespace unshard::python
