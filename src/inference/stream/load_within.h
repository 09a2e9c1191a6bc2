#pragma once
// A model's weights within a budget of memory.
#include <memory>
#include <string>

#include "inference/model/layer_weights.h"
#include "inference/stream/weight_stream.h"

namespace unshard::inference {

struct MemoryBudget {
  std::int64_t bytes = 0;  ///< of layers and output matrix, on this rank; 0: all of them
  std::string folder;      ///< for the file of packed weights; "": .unshard beside the model
};

struct LoadedWeights {
  ModelWeights weights;
  std::unique_ptr<WeightStream>
      stream;  ///< null: all is in memory. Else its units are the layers, then the outputs, whose matrices it places
};

/// Where they don't fit they are packed into a file, once for equal files, dtype, processor and shard; other processes wait for that and
/// use the same file. One that is stale or damaged is made anew. Cost: reads the file once.
/// \throws ModelError  a wrong tensor, a budget below the largest layer, a full disk
LoadedWeights load_within(const MemoryBudget& budget, const WeightSource& source, const ModelConfig& config, const std::string& dtype,
                          const Shard& shard, Workers& workers);

}  // namespace unshard::inference
