#pragma once
// Model and cache together, on one rank or on several that compute each step together.
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "inference/model/decoder.h"
#include "inference/model/step_model.h"
#include "inference/model/token_cost.h"
#include "inference/open_model.h"

namespace unshard::inference {

class Runner {
 public:
  /// `peers`: null, or those that compute with this rank; all have equal options. `other_devices`: for devices but "cpu".
  /// \throws ModelError, std::invalid_argument
  Runner(OpenedModel model, const EngineOptions& options, Workers& workers, std::shared_ptr<Peers> peers,
         const ModelFactory& other_devices = {});
  ~Runner();

  const ModelInfo& info() const { return info_; }
  /// As SchedulerOptions has it. 0 where a step takes as long whatever is in it: it waits for the disk, or for another device.
  std::int64_t look_back() const { return stream() != nullptr || options_.device != "cpu" ? 0 : look_back_tokens(model_->config()); }
  std::int64_t kv_blocks() const { return cache_->blocks(); }
  const WeightStream* stream() const { return model_->stream(); }  ///< null: all weights are in memory
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
  void make_model(OpenedModel model, const ModelFactory& other_devices);
  void make_cache();
  void describe();
  void obey();
  std::vector<float> logits_in(StepCache& own, std::span<const Token> tokens);

  EngineOptions options_;
  Workers& workers_;
  std::shared_ptr<Peers> peers_;
  std::int64_t context_ = 0;
  std::unique_ptr<StepModel> model_;
  std::unique_ptr<StepCache> cache_;
  ModelInfo info_;
  bool ended_ = false;
};

}  // namespace unshard::inference
