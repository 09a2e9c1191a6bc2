#include <torch/csrc/Exceptions.h>

#include "bindings.h"
#include "unshard/core/error.h"
#include "unshard/core/log.h"

namespace unshard::python {
namespace {

// Exception classes live as long as the interpreter; the translator is a plain function and needs to reach them.
struct ErrorTypes {
  PyObject *config = nullptr, *comm = nullptr, *checkpoint = nullptr;
};
ErrorTypes& types() {
  static ErrorTypes instance;
  return instance;
}

PyObject* new_error(py::module_& module, const char* name, const char* doc, PyObject* base) {
  PyObject* type = PyErr_NewExceptionWithDoc(cat("unshard.", name).c_str(), doc, base, nullptr);
  if (type == nullptr) throw py::error_already_set();
  module.add_object(name, type);
  return type;
}

void translate(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const ConfigError& e) {
    PyErr_SetString(types().config, e.what());
  } catch (const CommError& e) {
    PyErr_SetString(types().comm, e.what());
  } catch (const CheckpointError& e) {
    PyErr_SetString(types().checkpoint, e.what());
  } catch (python_error& e) {
    e.restore();  // raised by Python code that autograd called
  } catch (const c10::Error&) {
    torch::translate_exception_to_python(std::current_exception());
  }
}

}  // namespace

void bind_errors(py::module_& module) {
  types().config =
      new_error(module, "ConfigError", "The configuration can't be used; names key, value, origin and what is accepted.", PyExc_ValueError);
  types().comm = new_error(module, "CommError", "A peer failed, stalled or disagreed; names rank, collective, parameter and step.",
                           PyExc_RuntimeError);
  types().checkpoint =
      new_error(module, "CheckpointError", "A state file is damaged, foreign or missing; names file and reason.", PyExc_RuntimeError);
  py::register_local_exception_translator(&translate);
  module.def(
      "log_info", [](const std::string& text) { log_info(text); }, py::arg("text"), "One line for people on stderr.");
  module.def(
      "log_warning", [](int rank, const std::string& text) { log_warning(rank, text); }, py::arg("rank"), py::arg("text"));
}

}  // namespace unshard::python
