#pragma once
// What is known of each family of models.
#include "inference/model/model_config.h"
#include "inference/model/settings.h"

namespace unshard::inference {

/// Of a Hugging Face folder. `config`: config.json; `generation`: generation_config.json, or empty.
/// \throws ModelError naming file, key and reason; for a family that isn't known: those that are.
ModelConfig config_from_hugging_face(const Settings& config, const Settings& generation);

/// Of a GGUF file's metadata.
ModelConfig config_from_gguf(const Settings& metadata);

/// Sizes and switches that fit each other. \throws ModelError
void check_config(const ModelConfig& config, const std::string& file);

}  // namespace unshard::inference
