#include "python_optimizer.h"

namespace unshard::python {
namespace {

py::list item_list(const std::vector<UpdateItem>& items) {
  py::list result;
  for (const auto& item : items) {
    const py::object master = item.master.defined() ? py::cast(item.master) : py::object(py::none());
    result.append(py::make_tuple(item.parameter, item.group, item.param, master, item.grad));
  }
  return result;
}

}  // namespace

PythonOptimizer::PythonOptimizer(py::object client) : client_(hold(client)), type_(client.attr("type").cast<std::string>()) {}

void PythonOptimizer::step(const std::vector<UpdateItem>& items, const std::vector<GroupOptions>&, const UpdateScale& scale) {
  py::gil_scoped_acquire gil;
  client_->attr("step")(item_list(items), scale.scale);
}

std::vector<std::string> PythonOptimizer::state_names() const {
  py::gil_scoped_acquire gil;
  return client_->attr("state_names")().cast<std::vector<std::string>>();
}

void PythonOptimizer::expect_states(const std::vector<std::string>& names) {
  py::gil_scoped_acquire gil;
  client_->attr("expect")(names);
}

at::Tensor PythonOptimizer::state(int parameter, std::string_view name, const at::Tensor& like) {
  py::gil_scoped_acquire gil;
  const py::object value = client_->attr("state")(parameter, std::string(name), like);
  return value.is_none() ? at::Tensor() : value.cast<at::Tensor>();
}

std::int64_t PythonOptimizer::step_count(int parameter) const {
  py::gil_scoped_acquire gil;
  return client_->attr("step_count")(parameter).cast<std::int64_t>();
}

void PythonOptimizer::set_step_count(int parameter, std::int64_t steps) {
  py::gil_scoped_acquire gil;
  client_->attr("set_step_count")(parameter, steps);
}

std::int64_t PythonOptimizer::state_bytes() const {
  py::gil_scoped_acquire gil;
  return client_->attr("state_bytes")().cast<std::int64_t>();
}

void PythonOptimizer::prepare(const std::vector<UpdateItem>& items, const std::vector<GroupOptions>&) {
  py::gil_scoped_acquire gil;
  client_->attr("prepare")(item_list(items));
}

}  // namespace unshard::python
