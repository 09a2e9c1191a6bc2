#pragma once
// The model's parameters as the engine knows them, and how the engine takes them over.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gradient_pipeline.h"
#include "masters.h"
#include "unshard/engine/engine.h"
#include "unshard/zero/layout.h"

namespace unshard {

struct ModelParameter {
  int id = -1;  ///< in the store
  std::string name;
  at::Tensor tensor;             ///< the user's
  std::vector<at::Tensor> tied;  ///< other tensors of the user on the same storage
  int group = -1;                ///< -1: never trained
  bool active = false;           ///< in a group and required a gradient at start
  ShardLayout layout;
  c10::ScalarType dtype{};  ///< compute dtype
  c10::ScalarType original_dtype{};
  Geometry geometry;
  bool is_trained() const { return group >= 0; }
  bool is_row_major() const;  ///< in memory
};

/// In registration order; find by id.
class Model {
 public:
  /// Which group a name is in, with what: explicit groups, or one group of all floating-point parameters.
  /// \return an error text, empty if all is well (agreed on between ranks by the caller).
  std::string prepare(const NamedParameters& parameters, const std::vector<ParamGroup>& groups,
                      std::optional<c10::ScalarType> compute_dtype, int stage, const ParameterStore* store);
  /// Lines that must be alike on all ranks.
  std::vector<std::string> describe() const;
  /// Collective: rank 0's values win, values are cast to the compute dtype, masters start from the cast values, the store
  /// gets everything it doesn't have. Frees each original before the next one is touched.
  void take_over(ParameterStore& store, Masters& masters, const ZeroConfig& zero);

  std::vector<ModelParameter>& parameters() { return parameters_; }
  const std::vector<ModelParameter>& parameters() const { return parameters_; }
  /// nullptr: the store's parameter is not one of the engine's.
  const ModelParameter* find(int id) const;
  const ModelParameter& at(int id, const char* where) const;
  /// The parameter or a tied alias of that name.
  const ModelParameter* find(const std::string& name) const;
  /// Further names of tied parameters -> the name.
  std::map<std::string, std::string> shared_names() const;
  std::int64_t numel() const;
  std::int64_t largest_numel() const;
  std::int64_t hidden_size() const;  ///< the smaller side of the largest matrix; 0 without one
  c10::Device device() const;
  std::vector<std::string> names_by_id() const;

 private:
  struct Alias {
    std::string name;
    std::size_t index;
  };
  void index_ids();
  std::vector<ModelParameter> parameters_;
  std::vector<Alias> aliases_;
  std::vector<int> by_id_;  ///< id -> index in parameters_, -1
};

}  // namespace unshard
