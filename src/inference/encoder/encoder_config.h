#pragma once
// An encoder described as data: sizes, switches and the names of its tensors. A new family is a function in encoder_families.cc.
#include <cstdint>
#include <string>

#include "inference/kernels/matrix.h"
#include "inference/model/settings.h"

namespace unshard::inference {

/// Without ".weight" and ".bias"; "{}" stands for the layer.
struct EncoderNames {
  std::string words, positions, types, embedding_norm;
  std::string q, k, v, attention_output, attention_norm, up, down, output_norm;
};

struct EncoderConfig {
  std::string family;
  std::string prefix;  ///< of all tensors, in files of models with a head
  std::int64_t vocab = 0, hidden = 0, layers = 0, heads = 0, intermediate = 0;
  std::int64_t positions = 0;       ///< rows of the positions' table
  std::int64_t first_position = 0;  ///< a text's first token has this one
  Token padding = -1;               ///< a token that takes the position before the first and isn't counted; -1: none
  std::int64_t types = 0;           ///< kinds of segments; a text is of kind 0. 0: the family has none
  float norm_eps = 1e-12f;
  Gate activation = Gate::gelu;
  EncoderNames names;

  std::int64_t context() const { return positions - first_position; }
  std::int64_t head_size() const { return hidden / heads; }
};

bool is_encoder_family(const std::string& model_type);

/// \throws ModelError naming file, key and reason; for a family that isn't known: those that are.
EncoderConfig encoder_config(const Settings& config);

}  // namespace unshard::inference
