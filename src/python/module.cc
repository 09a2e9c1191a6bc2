#include "bindings.h"

PYBIND11_MODULE(_core, module) {
  using namespace unshard::python;
  module.doc() = "Binding of Unshard's C++ engine. Use the package `unshard`, which gives these names their Python forms.";
  bind_errors(module);
  bind_config(module);
  bind_record(module);
  bind_comm(module);
  bind_roll_call(module);
  bind_zero(module);
  bind_optim(module);
  bind_engine(module);
  bind_inference_ranks(module);
}
