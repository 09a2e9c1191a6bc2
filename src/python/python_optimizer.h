#pragma once
// An optimizer written in Python, as the engine sees it.
#include "bindings.h"

namespace unshard::python {

/// Forwards every call to an object with the methods of `unshard.optimizer.ClientOptimizer`, taking the GIL for each.
class PythonOptimizer : public Optimizer {
 public:
  explicit PythonOptimizer(py::object client);
  std::string type() const override { return type_; }
  void step(const std::vector<UpdateItem>& items, const std::vector<GroupOptions>& groups, const UpdateScale& scale) override;
  std::vector<std::string> state_names() const override;
  void expect_states(const std::vector<std::string>& names) override;
  at::Tensor state(int parameter, std::string_view name, const at::Tensor& like) override;
  std::int64_t step_count(int parameter) const override;
  void set_step_count(int parameter, std::int64_t steps) override;
  std::int64_t state_bytes() const override;
  void prepare(const std::vector<UpdateItem>& items, const std::vector<GroupOptions>& groups) override;

 private:
  std::shared_ptr<py::object> client_;
  std::string type_;
};

}  // namespace unshard::python
