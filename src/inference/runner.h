#pragma once
// Model and cache together, on one rank or on several that compute each step together.
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "inference/model/decoder.h"
#include "inference/open_model.h"

namespace unshard::inference {

class Runner {
 public:
  /// `peers`: null, or those that compute with this rank; all have equal options. \throws ModelError, std::invalid_argument
  Runner(OpenedModel model, const EngineOptions& options, Workers& workers, std::shared_ptr<Peers> peers);
  ~Runner();

  const ModelInfo& info() const { return info_; }
  std::int64_t kv_blocks() const { return cache_->blocks(); }
  using Copies = std::vector<std::pair<std::int32_t, std::int32_t>>;
  /// Copy blocks, then compute. On rank 0; the others do the same in follow().
  void step(const Copies& copies, const Batch& batch, std::vector<float>& logits);
  /// Logits of all positions, [tokens, vocab], in a cache of their own. On rank 0.
  std::vector<float> logits_alone(std::span<const Token> tokens);
  /// Of ranks above 0: compute what rank 0 computes, until it calls end().
  void follow();
  void end();
  /// This rank can't go on: the others' follow() throws.
  void fail() noexcept;
  /// Nothing to compute for a while: the others go on waiting.
  void rest() { tell(Order::rest, {}, {}); }

 private:
  enum class Order : std::int32_t { end, rest, step, open, alone, close };
  void tell(Order order, const Copies& copies, const Batch& batch);
  void make_cache();
  void describe();
  std::unique_ptr<KvCache> own_cache(std::int64_t blocks) const;

  EngineOptions options_;
  Workers& workers_;
  std::shared_ptr<Peers> peers_;
  std::int64_t context_ = 0;
  KvType kv_ = KvType::bf16;
  std::unique_ptr<Decoder> decoder_;
  std::unique_ptr<KvCache> cache_;
  ModelInfo info_;
  bool ended_ = false;
};

}  // namespace unshard::inference
