#pragma once
// A model's weights, packed once into a file.
#include <string>
#include <vector>

#include "inference/model/layer_weights.h"
#include "inference/stream/units.h"

namespace unshard::inference {

/// Which rows of the output matrix are units of their own, and how a unit is loaded.
struct UnitLoader {
  const WeightSource& source;
  const ModelConfig& config;
  const std::string& dtype;
  Shard shard;
  std::vector<Range> outputs;
};

/// Write all units to `path`, which is there with all of its content or not at all: a name of its own, fsync, rename.
/// Cost: reads every weight once; holds one unit (two where `two_at_once`), and one matrix as packed and as float.
/// \throws ModelError  the disk is full, the folder can't be written to, a tensor is wrong
void convert_weights(const UnitLoader& loader, const std::vector<Unit>& units, const std::string& path, const std::string& key,
                     bool two_at_once, Workers& workers);

}  // namespace unshard::inference
