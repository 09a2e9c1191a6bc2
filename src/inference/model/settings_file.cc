#include "inference/model/settings_file.h"

#include <fstream>
#include <sstream>

namespace unshard::inference {
namespace {
constexpr std::uintmax_t kMostJson = 64 << 20;  // of a config: what is larger is another file
}

nlohmann::json read_json(const std::filesystem::path& path, bool optional) {
  std::error_code error;
  if (optional && !std::filesystem::exists(path, error)) return nullptr;
  const auto bytes = std::filesystem::file_size(path, error);
  if (error) throw ModelError(cat(path.string(), ": can't be read: ", error.message()));
  if (bytes > kMostJson) throw ModelError(cat(path.string(), ": has ", bytes, " bytes, which is no configuration"));
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  auto json = nlohmann::json::parse(text.str(), nullptr, false);
  if (!file || json.is_discarded()) throw ModelError(cat(path.string(), ": isn't JSON: damaged or foreign"));
  return json;
}

Settings read_settings(const std::filesystem::path& path, bool optional) {
  auto json = read_json(path, optional);
  std::error_code error;
  if (json.is_null() && optional && !std::filesystem::exists(path, error)) json = nlohmann::json::object();
  if (!json.is_object()) throw ModelError(cat(path.string(), ": isn't a JSON object: damaged or foreign"));
  return {std::move(json), path.string()};
}

}  // namespace unshard::inference
