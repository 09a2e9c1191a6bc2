#pragma once
// The file of packed weights: a header that says whose they are, then the units, each in whole blocks.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "inference/model/model_config.h"
#include "inference/model/shard.h"
#include "inference/stream/weight_stream.h"

namespace unshard::inference {

/// All that packed weights depend on, as text: the model's files (name, size, time of change), dtype, instruction set, shard. Equal keys:
/// equal bytes.
std::string weight_key(const std::string& model, const std::string& dtype, const Shard& shard);

/// Name of the file for a key's model, dtype, instruction set and shard; one of another state of the model's files has the same.
std::string weight_file_name(const std::string& model, const std::string& key);

struct WeightFile {
  offload::AsyncFile file;
  std::vector<StoredUnit> units;
};

/// Nothing: there is none, or it is of another model, cut off or damaged (of the units only the sizes are looked at). \throws ModelError
std::optional<WeightFile> open_weight_file(const std::string& path, const std::string& key, const std::vector<Unit>& units);

/// The header's bytes, whole blocks.
std::int64_t header_bytes(const std::string& key, std::size_t units);
std::string header_of(const std::string& key, const std::vector<Unit>& units, const std::vector<StoredUnit>& stored);

}  // namespace unshard::inference
