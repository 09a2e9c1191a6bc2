#pragma once
// Tensors of a model file by the family's names, their shapes checked, brought into the form that packing wants.
#include <deque>
#include <set>
#include <string>
#include <vector>

#include "inference/model/model_config.h"
#include "inference/model/shard.h"
#include "inference/weights/weight_source.h"

namespace unshard::inference {

class TensorReader {
 public:
  /// `values`: false: what matrix(), columns() and half_split() give has the right shape and type, and no values to be read.
  TensorReader(const WeightSource& source, const ModelConfig& config, bool values = true);

  /// "{}" of a name in TensorNames replaced by the layer, "{e}" by the expert.
  static std::string name(const std::string& pattern, std::int64_t layer, std::int64_t expert = 0);
  /// The name as the file has it: with ".weight" or ".bias", and with or without a prefix such as "transformer.". Null: not there.
  const WeightView* find(const std::string& name, const char* kind) const;
  /// Those that look like weights of a layer and that find() has given to nobody, sorted: the family has a part that isn't computed.
  std::vector<std::string> unread() const;
  bool has(const std::string& name) const { return find(name, ".weight") != nullptr; }

  /// [rows, cols] (0: any). Stored [cols, rows] where the configuration says `transposed`: then as float, turned.
  WeightView matrix(const std::string& name, std::int64_t rows, std::int64_t cols);
  /// Part [first, first + rows) of a matrix of `all` rows.
  static WeightView part(const WeightView& whole, std::int64_t first, std::int64_t rows);
  /// Columns [range) of a matrix, in whole blocks of its type.
  WeightView columns(const WeightView& whole, Range range);
  /// Rows of q or k with pairs side by side, in each head, to half-split.
  WeightView half_split(const WeightView& view, std::int64_t heads);
  std::vector<float> vector(const std::string& name, const char* kind, std::int64_t width) const;  ///< empty: not there
  /// \throws ModelError: `name` isn't there
  std::vector<float> needed_vector(const std::string& name, std::int64_t width) const;
  static void half_split(std::vector<float>& bias, std::int64_t heads);
  /// Forget what matrix() and half_split() made.
  void drop_made() { made_.clear(); }
  /// The pages of what matrix() gave since the last call may leave memory.
  void done_with_read();
  const std::string& path() const { return source_.path(); }

 private:
  const WeightView* found(const std::string& name) const;
  const WeightView& needed(const std::string& name) const;
  WeightView make(const WeightView& like, std::int64_t rows, std::int64_t cols, FileType type);
  const WeightSource& source_;
  const ModelConfig& config_;
  const bool values_;
  std::vector<WeightView> read_;
  std::deque<std::vector<std::byte>> made_;
  mutable std::set<std::string> known_;  ///< names that find() has given
};

}  // namespace unshard::inference
