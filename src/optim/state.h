#pragma once
// Per-element states of an optimizer: fp32, one array per state name in a few large allocations, a view of it per parameter.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace unshard {

class OptimizerState {
 public:
  /// What one parameter has. `values[i]` belongs to names()[i]; undefined until created.
  struct Entry {
    std::vector<at::Tensor> values;
    std::int64_t steps = 0;
  };
  struct Request {
    int parameter;
    std::int64_t numel;
    at::Device device;
    std::size_t name;  ///< index into names()
    double initial;    ///< every element starts with this
  };

  explicit OptimizerState(std::vector<std::string> names) : names_(std::move(names)) {}

  const std::vector<std::string>& names() const { return names_; }
  /// Index of `name`, or names().size().
  std::size_t index(std::string_view name) const;
  Entry& entry(int parameter);
  const Entry* find(int parameter) const;
  /// Allocate what is missing of these, one array per name and device; what exists is left as it is.
  void create(const std::vector<Request>& requests);
  std::int64_t bytes() const { return bytes_; }

 private:
  std::vector<std::string> names_;
  std::unordered_map<int, Entry> entries_;
  std::int64_t bytes_ = 0;
};

}  // namespace unshard
