#pragma once
// From a path to what a decoder is made of.
#include <memory>
#include <string>

#include "inference/model/model_config.h"
#include "inference/weights/weight_source.h"

namespace unshard::inference {

struct OpenedModel {
  std::unique_ptr<WeightSource> weights;
  ModelConfig config;
};

/// A Hugging Face folder or a GGUF file. Cost: reads headers only.
/// \throws ModelError naming file and reason
OpenedModel open_model(const std::string& path);

}  // namespace unshard::inference
