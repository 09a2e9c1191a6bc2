#include "inference/encoder/sentence_settings.h"

#include <algorithm>
#include <map>

#include "inference/model/settings_file.h"

namespace unshard::inference {
namespace {

struct Module {
  std::string kind, path;
};

/// modules.json: a list of {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling", ...}.
std::vector<Module> modules_of(const std::filesystem::path& file) {
  const auto json = read_json(file);
  if (!json.is_array()) throw ModelError(cat(file.string(), ": isn't a list of modules: damaged or foreign"));
  std::vector<Module> modules;
  for (const auto& each : json) {
    const Settings module(each.is_object() ? each : nlohmann::json::object(), file.string());
    const auto type = module.get<std::string>("type");
    modules.push_back({type.substr(type.rfind('.') + 1), module.get<std::string>("path")});
    const auto& path = modules.back().path;
    if (path.starts_with("/") || path.find("..") != std::string::npos) module.fail("path", "a folder inside this one is wanted");
  }
  return modules;
}

Pooling pooling_of(const Settings& settings) {
  static const std::map<std::string, Pooling> built = {
      {"pooling_mode_mean_tokens", Pooling::mean}, {"pooling_mode_cls_token", Pooling::cls}, {"pooling_mode_max_tokens", Pooling::max}};
  std::vector<std::string> chosen;
  for (const auto& [key, value] : settings.json().items())
    if (key.starts_with("pooling_mode_") && settings.get<bool>(key)) chosen.push_back(key);
  if (chosen.empty() && settings.has("pooling_mode")) chosen.push_back(cat("pooling_mode_", settings.get<std::string>("pooling_mode")));
  if (chosen.size() == 1)
    for (const auto& [key, pooling] : built)
      if (key == chosen.front() || key == chosen.front() + "_tokens" || key == chosen.front() + "_token") return pooling;
  std::string named;
  for (const auto& key : chosen) named += (named.empty() ? "" : ", ") + key;
  throw ModelError(cat(settings.file(), ": pooling by '", named, "' isn't built; one of mean, cls and max is"));
}

void read_modules(const std::filesystem::path& folder, SentenceSettings& out) {
  const auto file = folder / "modules.json";
  bool pooled = false;
  for (const auto& module : modules_of(file)) {
    if (module.kind == "Transformer") {
      if (!module.path.empty())
        throw ModelError(cat(file.string(), ": a Transformer in '", module.path, "' isn't built; one beside modules.json is"));
    } else if (module.kind == "Pooling") {
      out.pooling = pooling_of(read_settings(folder / module.path / "config.json"));
      pooled = true;
    } else if (module.kind == "Normalize") {
      out.normalise = true;
    } else {
      throw ModelError(cat(file.string(), ": the module ", module.kind, " isn't built; Transformer, Pooling and Normalize are"));
    }
  }
  if (!pooled) throw ModelError(cat(file.string(), ": names no Pooling, and so gives no vector of a text"));
}

/// Dimensions below `hidden` that config.json says a vector may be cut to.
std::vector<std::int64_t> shorter_of(const Settings& config, std::int64_t hidden) {
  auto sizes = config.get<std::vector<std::int64_t>>("matryoshka_dimensions", {});
  std::erase_if(sizes, [&](std::int64_t size) { return size < 1 || size >= hidden; });
  std::sort(sizes.begin(), sizes.end());
  return sizes;
}

}  // namespace

const char* pooling_name(Pooling pooling) { return pooling == Pooling::mean ? "mean" : pooling == Pooling::cls ? "cls" : "max"; }

SentenceSettings sentence_settings(const std::filesystem::path& folder, const Settings& config) {
  SentenceSettings out;
  std::error_code error;
  if (std::filesystem::exists(folder / "modules.json", error)) read_modules(folder, out);
  const auto text = read_settings(folder / "sentence_bert_config.json", true);
  out.most_tokens = text.size_or("max_seq_length", 0, 1);
  if (text.get<bool>("do_lower_case", false)) text.fail("do_lower_case", "not built; the tokenizer's own lower-casing is");
  const auto prompts = read_settings(folder / "config_sentence_transformers.json", true);
  if (prompts.has("default_prompt_name"))
    prompts.fail("default_prompt_name", "a prompt before every text isn't built; remove it, and write it into the texts");
  out.shorter = shorter_of(config, config.size(config.has("hidden_size") ? "hidden_size" : "dim"));
  return out;
}

}  // namespace unshard::inference
