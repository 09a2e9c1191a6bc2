#pragma once
// A checkpoint that a Python object reads, as the engine sees it.
#include <string>

#include "bindings.h"
#include "unshard/checkpoint/source.h"

namespace unshard::python {

/// Forwards to an object with `origin` (text), `contents` (a dict: manifest.json without "files", each parameter with its "kinds") and
/// `read(kind, name, begin, end)` (a flat CPU tensor). Takes the GIL for each call; what Python raises becomes a CheckpointError.
class PythonSource : public checkpoint::Source {
 public:
  explicit PythonSource(py::object object);
  const checkpoint::Contents& contents() const override { return contents_; }
  at::Tensor read(const checkpoint::Range& range) override;

 private:
  std::shared_ptr<py::object> object_;
  checkpoint::Contents contents_;
};

}  // namespace unshard::python
