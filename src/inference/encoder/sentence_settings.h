#pragma once
// What sentence-transformers' files say beside an encoder: how rows become a vector, and how long a text may be.
#include <cstdint>
#include <filesystem>
#include <vector>

#include "inference/model/settings.h"

namespace unshard::inference {

enum class Pooling { mean, cls, max };

const char* pooling_name(Pooling pooling);

struct SentenceSettings {
  Pooling pooling = Pooling::mean;  ///< as sentence-transformers takes a plain Hugging Face folder
  bool normalise = false;
  std::int64_t most_tokens = 0;       ///< of a text; 0: nothing is said
  std::vector<std::int64_t> shorter;  ///< dimensions that a vector may be cut to
};

/// \param config  config.json of the same folder
/// \throws ModelError  a module, a pooling or a switch that isn't built
SentenceSettings sentence_settings(const std::filesystem::path& folder, const Settings& config);

}  // namespace unshard::inference
