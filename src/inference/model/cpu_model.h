#pragma once
// The StepModel of this processor: Decoder and KvCache.
#include "inference/model/decoder.h"
#include "inference/model/step_model.h"

namespace unshard::inference {

class CpuModel : public StepModel {
 public:
  /// dtype, kv_dtype: as EngineOptions'. \throws ModelError
  CpuModel(std::unique_ptr<WeightSource> source, ModelConfig config, const std::string& dtype, const std::string& kv_dtype,
           std::int64_t context, Workers& workers, std::shared_ptr<Peers> peers, const MemoryBudget& budget = {});

  const ModelConfig& config() const override { return decoder_.config(); }
  ModelFacts facts() const override;
  const WeightStream* stream() const override { return decoder_.stream(); }
  std::unique_ptr<StepCache> new_cache(std::int64_t blocks) const override;
  void forward(const Batch& batch, StepCache& cache, std::vector<float>& logits) override;

 private:
  Decoder decoder_;
  const std::string dtype_;
  KvType kv_;
};

}  // namespace unshard::inference
