#pragma once
// Memory of the paged KV cache: one region a layer, divided into blocks that the scheduler hands out.
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "inference/kernels/attention.h"
#include "inference/model/step_model.h"

namespace unshard::inference {

class KvCache : public StepCache {
 public:
  /// Address space is taken at once, pages as blocks are first written. \throws ModelError too little memory
  KvCache(std::int64_t layers, std::int64_t blocks, KvType type, std::int64_t kv_heads, std::int64_t head_size);
  ~KvCache() override;
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  const KvLayer& layer(std::int64_t i) const { return layers_[static_cast<std::size_t>(i)]; }
  std::int64_t blocks() const override { return blocks_; }
  std::int64_t bytes() const override { return bytes_; }
  void copy(std::span<const std::pair<std::int32_t, std::int32_t>> copies) override;

 private:
  std::vector<KvLayer> layers_;
  std::int64_t blocks_ = 0, bytes_ = 0;
  void* memory_ = nullptr;
};

/// Bytes of one block in all layers.
std::int64_t kv_bytes_per_block(std::int64_t layers, KvType type, std::int64_t kv_heads, std::int64_t head_size);

}  // namespace unshard::inference
