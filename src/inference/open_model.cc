#include "inference/open_model.h"

#include <filesystem>

#include "inference/model/families.h"
#include "inference/model/settings_file.h"
#include "inference/weights/gguf.h"
#include "unshard/core/error.h"

namespace unshard::inference {
namespace {

OpenedModel open_folder(const std::filesystem::path& folder) {
  std::error_code error;
  if (!std::filesystem::exists(folder / "config.json", error))
    throw ModelError(cat(folder.string(), ": has no config.json; a Hugging Face folder or a GGUF file is wanted"));
  OpenedModel model;
  model.config = config_from_hugging_face(read_settings(folder / "config.json"), read_settings(folder / "generation_config.json", true));
  model.weights = open_weights(folder.string());
  return model;
}

/// Llama 3's scaling comes as a tensor of divisors there.
void read_rope_factors(const WeightSource& weights, ModelConfig& config) {
  const WeightView* factors = weights.find("rope_freqs.weight");
  if (!factors || factors->rows * factors->cols != config.rope.rotary / 2) return;
  std::vector<float> values(static_cast<std::size_t>(config.rope.rotary / 2));
  WeightView flat = *factors;
  flat.cols *= flat.rows;
  flat.rows = 1;
  expand_row(flat, 0, values.data());
  config.rope.kind = RopeKind::longrope;
  config.rope.attention_factor = 1;
  config.rope.short_factors.assign(values.begin(), values.end());
  config.rope.long_factors = config.rope.short_factors;
}

OpenedModel open_gguf(const std::string& path) {
  auto file = std::make_unique<GgufFile>(path);
  OpenedModel model;
  model.config = config_from_gguf({file->metadata(), path});
  if (const auto* embedding = file->find("token_embd.weight"); embedding && model.config.vocab == 0) model.config.vocab = embedding->rows;
  read_rope_factors(*file, model.config);
  model.weights = std::move(file);
  return model;
}

}  // namespace

OpenedModel open_model(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) return open_folder(path);
  if (!std::filesystem::exists(path, error)) throw ModelError(cat(path, ": there is no such file or folder"));
  return open_gguf(path);
}

}  // namespace unshard::inference
