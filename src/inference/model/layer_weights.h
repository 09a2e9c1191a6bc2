#pragma once
// A decoder's weights, packed for the processor.
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "inference/kernels/matrix.h"
#include "inference/model/model_config.h"
#include "inference/model/shard.h"
#include "inference/model/tensor_reader.h"
#include "inference/weights/weight_source.h"

namespace unshard::inference {

struct Linear {
  Matrix matrix;
  std::vector<float> bias;  ///< empty: none
  const float* bias_data() const { return bias.empty() ? nullptr : bias.data(); }
};

struct NormWeights {
  std::vector<float> weight, bias;
  bool there() const { return !weight.empty(); }
};

struct MlpWeights {
  Linear in, down;  ///< in: gate and up where gated, else up
};

struct ExpertWeights {
  Linear router;  ///< fp32
  std::vector<MlpWeights> experts;
  MlpWeights shared;
  Linear shared_switch;  ///< fp32, [1, hidden]
};

struct LayerWeights {
  NormWeights attention_norm, q_norm, k_norm, post_attention_norm, mlp_norm, post_mlp_norm;
  Linear qkv, attention_output;
  bool dense = true;
  MlpWeights mlp;
  ExpertWeights experts;
  std::int64_t window = 0;
  bool local_rope = false;
};

/// Rows of the output matrix: tokens from `first` on.
struct OutputPart {
  Linear linear;
  std::int64_t first = 0;
};

struct ModelWeights {
  WeightView embedding, positions;  ///< read where they lie in the file
  NormWeights final_norm;
  std::vector<LayerWeights> layers;
  std::vector<OutputPart> outputs;  ///< this rank's part of the vocabulary, in order; one part unless weights are streamed
  std::int64_t bytes = 0, parameters = 0;
  std::vector<std::string> unread;  ///< ModelInfo's
};

/// Which type a matrix of the file is packed to, for what the user asked. `dtype`: as EngineOptions::dtype.
WeightType weight_type_for(const std::string& dtype, FileType type);

/// How a matrix comes to be from the rows of all `parts`; `gated`: from gate and up.
using MakeMatrix = std::function<Matrix(std::span<const WeightView> parts, WeightType type, bool gated)>;
MakeMatrix pack_with(Workers& workers);

/// Reads a model part by part; its matrices are made by `make`, in the same order each time.
class WeightLoader {
 public:
  /// \param shard   which part of each matrix; biases of cut sums are rank 0's
  /// \param values  false: `make` gets views without values (TensorReader): cheap, for who only wants to know what there is
  WeightLoader(const WeightSource& source, const ModelConfig& config, std::string dtype, const Shard& shard, MakeMatrix make,
               bool values = true);

  /// All but layers and outputs. This and what follows: \throws ModelError naming a missing tensor, or one of another shape than the
  /// configuration says
  ModelWeights frame();
  LayerWeights layer(std::int64_t i);
  /// This rank's part of the vocabulary, and the rows `rows` of it.
  Range vocabulary() const { return shard_.of(config_.vocab, 16); }
  OutputPart output(Range rows);
  /// `bytes` and `parameters` of what was loaded.
  void sum_up(ModelWeights& weights) const;
  /// The files' pages of what was read may leave memory.
  void done_with_read() { reader_.done_with_read(); }

 private:
  WeightView embedding(const std::string& name, std::int64_t rows);
  NormWeights norm(const std::string& name, std::int64_t width);
  Linear linear(std::span<const WeightView> parts, WeightType type, bool gated = false);
  Linear linear(const std::vector<WeightView>& parts) { return linear(parts, type_of(parts)); }
  Linear router(const std::string& name, std::int64_t rows);
  Linear qkv(std::int64_t i);
  MlpWeights mlp(const std::string& gate, const std::string& up, const std::string& down, const std::string& gate_up,
                 std::int64_t intermediate);
  Linear gated(const WeightView& gate, const WeightView& up);
  ExpertWeights experts(std::int64_t i);
  LayerWeights read_layer(std::int64_t i);
  std::vector<float> bias_of_sum(const std::string& name) const;
  std::vector<float> gated_bias(const std::string& name, std::int64_t first, bool fused, std::int64_t intermediate, Range mine) const;
  Range features(std::int64_t intermediate) const;
  bool tied() const { return !config_.untied && !reader_.has(names_.output); }
  WeightType type_of(std::span<const WeightView> views) const;
  WeightType type_of(const WeightView& view) const;

  TensorReader reader_;
  const ModelConfig& config_;
  const TensorNames& names_;
  std::string dtype_;
  const Shard shard_;
  MakeMatrix make_;
  std::int64_t bytes_ = 0, parameters_ = 0;
};

/// Cost: reads every weight once; holds the packed weights and one matrix as float. \throws ModelError
ModelWeights load_weights(const WeightSource& source, const ModelConfig& config, const std::string& dtype, const Shard& shard,
                          Workers& workers);

}  // namespace unshard::inference
