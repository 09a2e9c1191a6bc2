#include "inference/model/cpu_model.h"

namespace unshard::inference {
namespace {

KvType kv_type(const std::string& asked, const std::string& dtype, const ModelWeights& weights) {
  if (asked == "int8") return KvType::int8;
  if (asked == "bf16") return KvType::bf16;
  if (asked == "fp32") return KvType::f32;
  const bool full = dtype == "fp32" || (dtype == "auto" && weights.layers.front().qkv.matrix.type() == WeightType::f32);
  return full ? KvType::f32 : KvType::bf16;
}

const char* kv_name(KvType type) { return type == KvType::f32 ? "fp32" : type == KvType::bf16 ? "bf16" : "int8"; }

}  // namespace

CpuModel::CpuModel(std::unique_ptr<WeightSource> source, ModelConfig config, const std::string& dtype, const std::string& kv_dtype,
                   std::int64_t context, Workers& workers, std::shared_ptr<Peers> peers, const MemoryBudget& budget)
    : decoder_(std::move(source), std::move(config), dtype, context, workers, std::move(peers), budget),
      dtype_(dtype),
      kv_(kv_type(kv_dtype, dtype, decoder_.weights())) {}

ModelFacts CpuModel::facts() const {
  const auto& weights = decoder_.weights();
  const auto& sizes = decoder_.config();
  return {.dtype = dtype_ == "auto" ? weight_type_name(weights.layers.front().qkv.matrix.type()) : dtype_,
          .kv_dtype = kv_name(kv_),
          .parameters = weights.parameters,
          .weight_bytes = weights.bytes,
          .block_bytes = kv_bytes_per_block(sizes.layers, kv_, sizes.kv_heads, sizes.head_size),
          .unread = weights.unread};
}

std::unique_ptr<StepCache> CpuModel::new_cache(std::int64_t blocks) const {
  return std::make_unique<KvCache>(config().layers, blocks, kv_, decoder_.kv_heads(), config().head_size);
}

void CpuModel::forward(const Batch& batch, StepCache& cache, std::vector<float>& logits) {
  decoder_.forward(batch, static_cast<KvCache&>(cache), logits);
}

}  // namespace unshard::inference
