#pragma once
// The model itself: tokens of several texts in, one after another without padding; the last layer's rows out.
#include <memory>
#include <span>
#include <vector>

#include "inference/encoder/encoder_weights.h"
#include "inference/model/kv_cache.h"

namespace unshard::inference {

class Encoder {
 public:
  /// \throws ModelError
  Encoder(std::unique_ptr<WeightSource> source, EncoderConfig config, const std::string& dtype, Workers& workers);

  const EncoderConfig& config() const { return config_; }
  const EncoderWeights& weights() const { return weights_; }
  /// Rows of all texts, in order: [tokens, hidden], until the next call. No text is empty or longer than the context.
  /// Bits of a text's rows depend on its own tokens only.
  /// Cost: scratch grows to the largest batch seen and is kept.
  const float* forward(std::span<const std::span<const Token>> texts);

 private:
  void place(std::span<const std::span<const Token>> texts);
  void resize(std::int64_t tokens, std::int64_t blocks);
  void embed();
  void normalise(const NormWeights& norm);
  void attend(const EncoderLayer& layer);
  void feed_forward(const EncoderLayer& layer);

  std::unique_ptr<WeightSource> source_;
  EncoderConfig config_;
  Workers& workers_;
  EncoderWeights weights_;
  // Of this batch:
  std::vector<Token> tokens_;
  std::vector<std::int64_t> places_;
  std::vector<AttentionSpan> spans_;
  // Scratch:
  std::int64_t capacity_ = 0;
  std::vector<std::int32_t> block_table_;
  std::unique_ptr<KvCache> keys_;  ///< of one layer at a time
  std::vector<float> x_, qkv_, attended_, inner_;
  Activations in_, inner_in_;
};

}  // namespace unshard::inference
