#pragma once
// The Python module `_core`: conversions only. One bind_<area>.cc an area; the GIL is released around whatever waits or computes.
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>
#include <utility>

#include "python_objects.h"
#include "unshard/comm/communicator.h"
#include "unshard/comm/run_record.h"
#include "unshard/engine/engine.h"
#include "unshard/optim/optimizer.h"
#include "unshard/zero/parameter_store.h"

namespace unshard::python {

void bind_errors(py::module_& module);
void bind_config(py::module_& module);
void bind_record(py::module_& module);
void bind_comm(py::module_& module);
void bind_roll_call(py::module_& module);
void bind_zero(py::module_& module);
void bind_optim(py::module_& module);
void bind_engine(py::module_& module);
void bind_inference_ranks(py::module_& module);

/// What Python holds of a C++ object: dropping the last reference may join threads, so it happens without the GIL.
template <class T>
struct Handle {
  std::shared_ptr<T> pointer;

  explicit Handle(std::shared_ptr<T> value) : pointer(std::move(value)) {}
  Handle(const Handle&) = default;
  Handle& operator=(const Handle&) = default;
  ~Handle() {
    if (pointer.use_count() == 1 && PyGILState_Check()) {
      py::gil_scoped_release nogil;
      pointer.reset();
    }
  }
  T* operator->() const { return pointer.get(); }
  T& operator*() const { return *pointer; }
};

using RecordHandle = Handle<RunRecord>;
using CommHandle = Handle<Communicator>;
using StoreHandle = Handle<ParameterStore>;
using OptimizerHandle = Handle<Optimizer>;
using EngineHandle = Handle<Engine>;

/// Saving and loading, beside the rest of the engine.
void bind_checkpoint(py::module_& module, py::class_<EngineHandle>& engine);

/// torch registers these classes with holders of its own, so the objects are reached by pointer and counted by their own counter.
template <class T>
c10::intrusive_ptr<T> shared(const py::object& object) {
  return c10::intrusive_ptr<T>::reclaim_copy(object.cast<T*>());
}

/// Checks for Ctrl-C (and other signals) inside long waits; only the main thread of Python may run signal handlers.
std::function<void()> interrupt_check();

}  // namespace unshard::python
