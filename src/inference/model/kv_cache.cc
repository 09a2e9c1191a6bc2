#include "inference/model/kv_cache.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "unshard/core/error.h"
#include "unshard/inference/engine.h"

namespace unshard::inference {
namespace {
constexpr std::int64_t kHugePage = 2 << 20;
}

std::int64_t kv_bytes_per_block(std::int64_t layers, KvType type, std::int64_t kv_heads, std::int64_t head_size) {
  return layers * kv_block_bytes(type, kv_heads, head_size);
}

KvCache::KvCache(std::int64_t layers, std::int64_t blocks, KvType type, std::int64_t kv_heads, std::int64_t head_size)
    : blocks_(blocks), bytes_(blocks * kv_bytes_per_block(layers, type, kv_heads, head_size)) {
  memory_ = mmap(nullptr, static_cast<std::size_t>(bytes_ + kHugePage), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                 -1, 0);
  if (memory_ == MAP_FAILED) {
    memory_ = nullptr;
    throw ModelError(cat("[inference.kv_cache] ", bytes_, " bytes for ", blocks, " KV blocks can't be had: ", std::strerror(errno),
                         "; ask for a smaller kv_cache_tokens"));
  }
  // Attention reads blocks here and there: with small pages a third of its time would go into finding them.
  const auto start = (reinterpret_cast<std::uintptr_t>(memory_) + kHugePage - 1) / kHugePage * kHugePage;
  madvise(reinterpret_cast<void*>(start), static_cast<std::size_t>(bytes_), MADV_HUGEPAGE);
  const std::int64_t region = bytes_ / layers;
  for (std::int64_t i = 0; i < layers; ++i) layers_.push_back({reinterpret_cast<char*>(start) + i * region, type, kv_heads, head_size});
}

KvCache::~KvCache() {
  if (memory_) munmap(memory_, static_cast<std::size_t>(bytes_ + kHugePage));
}

void KvCache::copy(std::span<const std::pair<std::int32_t, std::int32_t>> copies) {
  for (const auto& [from, to] : copies)
    for (const auto& layer : layers_) kv_copy_block(layer, from, to);
}

}  // namespace unshard::inference
