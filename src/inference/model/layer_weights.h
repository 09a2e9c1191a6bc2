#pragma once
// A decoder's weights, packed for the processor.
#include <functional>
#include <memory>
#include <vector>

#include "inference/kernels/matrix.h"
#include "inference/model/model_config.h"
#include "inference/model/shard.h"
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

struct ModelWeights {
  WeightView embedding, positions;  ///< read where they lie in the file
  NormWeights final_norm;
  Linear output;  ///< of this rank: vocabulary from first_output on
  std::int64_t first_output = 0;
  std::vector<LayerWeights> layers;
  std::int64_t bytes = 0, parameters = 0;
};

/// Which type a matrix of the file is packed to, for what the user asked. `dtype`: as EngineOptions::dtype.
WeightType weight_type_for(const std::string& dtype, FileType type);

/// `shard`: which part of each matrix; biases of cut sums are rank 0's.
/// Cost: reads every weight once; holds the packed weights and one matrix as float.
/// \throws ModelError naming a missing tensor, or one of another shape than the configuration says
ModelWeights load_weights(const WeightSource& source, const ModelConfig& config, const std::string& dtype, const Shard& shard,
                          Workers& workers);

}  // namespace unshard::inference
