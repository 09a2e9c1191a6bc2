#pragma once
// The model itself: tokens of many sequences in, logits of the rows that want them out.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "inference/model/kv_cache.h"
#include "inference/model/layer_weights.h"
#include "inference/model/shard.h"
#include "inference/stream/load_within.h"
#include "unshard/inference/engine.h"

namespace unshard::inference {

/// One step's work: rows of tokens, the sequences' spans one after another.
struct Batch {
  std::vector<Token> tokens;            ///< [T]
  std::vector<std::int32_t> positions;  ///< [T]
  std::vector<AttentionSpan> spans;
  std::vector<std::int64_t> logit_rows;  ///< ascending
  void clear();
  /// Rows of one sequence from `position` on. `blocks` must live until the step is done.
  void add(std::span<const Token> more, std::int64_t position, const std::int32_t* blocks);
};

class Decoder {
 public:
  /// \throws ModelError
  Decoder(std::unique_ptr<WeightSource> source, ModelConfig config, const std::string& dtype, std::int64_t context, Workers& workers,
          std::shared_ptr<Peers> peers = nullptr, const MemoryBudget& budget = {});

  const ModelConfig& config() const { return config_; }
  const ModelWeights& weights() const { return weights_; }
  const WeightStream* stream() const { return stream_.get(); }  ///< null: all weights are in memory
  std::int64_t kv_heads() const { return kv_heads_; }           ///< of this rank
  /// Store the rows' keys and values and compute the logits, [logit_rows, vocab].
  /// Bits of a row depend on its sequence's tokens only, not on what else is in the batch.
  /// Cost: scratch grows to the largest batch seen and is kept.
  void forward(const Batch& batch, KvCache& cache, std::vector<float>& logits);

 private:
  struct Rope {
    std::vector<float> cos, sin;
    RopeConfig config;
  };
  void resize(std::int64_t tokens);
  void embed(const Batch& batch);
  void normalise(const NormWeights& norm, const float* x, float* out, std::int64_t tokens);
  void attend(const LayerWeights& layer, const KvLayer& cache, const Batch& batch);
  void norm_heads(const LayerWeights& layer, std::int64_t tokens);
  void rotate(const LayerWeights& layer, const Batch& batch);
  void mlp(const MlpWeights& mlp, Activations& x, float* out, bool accumulate, std::int64_t tokens);
  void feed_forward(const LayerWeights& layer, std::int64_t tokens);
  void add_linear(const NormWeights& post_norm, const Linear& linear, Activations& x, std::int64_t tokens);
  void add_branch(const NormWeights& post_norm, std::int64_t tokens);
  void mixture(const ExpertWeights& experts, std::int64_t tokens, float* out);
  void project(const Batch& batch, std::vector<float>& logits);

  std::unique_ptr<WeightSource> source_;
  ModelConfig config_;
  Workers& workers_;
  std::shared_ptr<Peers> peers_;  ///< null: this rank has the whole model
  ModelWeights weights_;
  std::unique_ptr<WeightStream> stream_;   ///< null: all weights are in memory
  std::int64_t heads_ = 0, kv_heads_ = 0;  ///< of this rank
  Rope rope_, local_rope_;
  std::int64_t capacity_ = 0;
  std::vector<float> x_, normed_, qkv_, attended_, inner_, branch_, few_;
  Activations in_, out_, inner_in_;
};

}  // namespace unshard::inference
