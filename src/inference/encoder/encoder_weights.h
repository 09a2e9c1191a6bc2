#pragma once
// An encoder's weights, packed for the processor.
#include <string>
#include <vector>

#include "inference/encoder/encoder_config.h"
#include "inference/model/layer_weights.h"

namespace unshard::inference {

struct EncoderLayer {
  Linear qkv, attention_output, up, down;
  NormWeights attention_norm, output_norm;
};

struct EncoderWeights {
  WeightView words;           ///< [vocab, hidden], in the file
  std::vector<float> places;  ///< [positions, hidden]: the positions' rows plus that of segment 0
  NormWeights embedding_norm;
  std::vector<EncoderLayer> layers;
  std::int64_t bytes = 0, parameters = 0;
};

/// \throws ModelError a tensor is missing or has another shape than the configuration wants
EncoderWeights load_encoder(const WeightSource& source, const EncoderConfig& config, const std::string& dtype, Workers& workers);

}  // namespace unshard::inference
