#pragma once
// Configurations of a model's folder, read from their JSON files.
#include <filesystem>

#include "inference/model/settings.h"

namespace unshard::inference {

/// Whatever JSON the file holds; null where `optional` and there is none. \throws ModelError
nlohmann::json read_json(const std::filesystem::path& path, bool optional = false);
/// The object that the file holds; an empty one where `optional` and there is none. \throws ModelError
Settings read_settings(const std::filesystem::path& path, bool optional = false);

}  // namespace unshard::inference
