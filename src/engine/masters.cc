#include "masters.h"

#include "flat.h"
#include "unshard/core/error.h"

namespace unshard {

void Masters::reserve(const std::vector<std::pair<int, ShardLayout>>& parameters) {
  std::int64_t total = 0;
  const auto length = [this](const ShardLayout& layout) { return whole_ ? layout.numel : layout.size(rank_); };
  for (const auto& [id, layout] : parameters) total += length(layout);
  const auto arena = flat::empty(total, c10::ScalarType::Float, device_);
  bytes_ += total * 4;
  std::int64_t offset = 0;
  for (const auto& [id, layout] : parameters) {
    if (entries_.size() <= static_cast<std::size_t>(id)) entries_.resize(id + 1);
    UNSHARD_DCHECK(!entries_[id].memory.defined(), "second master of parameter ", id);
    entries_[id] = {flat::slice(arena, offset, length(layout)), layout};
    offset += length(layout);
  }
}

bool Masters::has(int parameter) const {
  return static_cast<std::size_t>(parameter) < entries_.size() && entries_[parameter].memory.defined();
}

void Masters::set_whole(int parameter, const at::Tensor& flat) {
  const auto& layout = entries_[parameter].layout;
  flat::copy(entries_[parameter].memory, whole_ ? flat : flat::slice(flat, layout.begin(rank_), layout.size(rank_)));
}

at::Tensor Masters::domain(int parameter) const { return has(parameter) ? entries_[parameter].memory : at::Tensor(); }

at::Tensor Masters::piece(int parameter) const {
  if (!has(parameter) || !whole_) return domain(parameter);
  const auto& layout = entries_[parameter].layout;
  return flat::slice(entries_[parameter].memory, layout.begin(rank_), layout.size(rank_));
}

void Masters::move_to(c10::Device device) {
  if (device == device_) return;
  device_ = device;
  for (auto& entry : entries_) {
    if (entry.memory.defined()) entry.memory = entry.memory.to(device);
  }
}

}  // namespace unshard
