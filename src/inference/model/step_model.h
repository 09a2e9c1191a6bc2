#pragma once
// The seam between what decides a step and what computes it: our kernels on this processor (CpuModel), or LibTorch on any of its devices
// (src/inference_torch).
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "inference/model/model_config.h"

namespace unshard::inference {

struct Batch;
class WeightStream;

/// The paged keys and values of all layers, in the memory of the model that made it.
class StepCache {
 public:
  virtual ~StepCache() = default;
  virtual std::int64_t blocks() const = 0;
  virtual std::int64_t bytes() const = 0;
  /// Of blocks, in every layer, in order. Pairs are (from, to).
  virtual void copy(std::span<const std::pair<std::int32_t, std::int32_t>> copies) = 0;
};

struct ModelFacts {
  std::string dtype, kv_dtype;  ///< as resolved
  std::int64_t parameters = 0, weight_bytes = 0;
  std::int64_t block_bytes = 0;     ///< of a KV block of all layers and heads: alike on all ranks, whatever share of the heads each has
  std::vector<std::string> unread;  ///< ModelInfo's
};

/// Used from one thread at a time.
class StepModel {
 public:
  virtual ~StepModel() = default;
  virtual const ModelConfig& config() const = 0;
  virtual ModelFacts facts() const = 0;
  /// Null: all weights are in memory.
  virtual const WeightStream* stream() const { return nullptr; }
  /// \throws ModelError too little memory
  virtual std::unique_ptr<StepCache> new_cache(std::int64_t blocks) const = 0;
  /// Store the rows' keys and values and compute the logits, [logit_rows, vocab]. `cache`: one of new_cache().
  virtual void forward(const Batch& batch, StepCache& cache, std::vector<float>& logits) = 0;
};

}  // namespace unshard::inference
