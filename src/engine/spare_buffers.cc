#include "spare_buffers.h"

#include <algorithm>
#include <utility>

#include "flat.h"

namespace unshard {

at::Tensor SpareBuffers::take(std::int64_t numel, c10::ScalarType dtype, c10::Device device) {
  {
    const std::lock_guard lock(mutex_);
    const auto fits = [&](const at::Tensor& t) { return t.numel() == numel && t.scalar_type() == dtype && t.device() == device; };
    // The one given back last: the likeliest to be in the processor's cache.
    const auto found = std::find_if(spare_.rbegin(), spare_.rend(), fits);
    if (found != spare_.rend()) {
      at::Tensor tensor = std::move(*found);
      spare_.erase(std::next(found).base());
      bytes_ -= static_cast<std::int64_t>(tensor.nbytes());
      return tensor;
    }
  }
  return flat::empty(numel, dtype, device);
}

void SpareBuffers::give_back(at::Tensor&& tensor) {
  at::Tensor mine = std::move(tensor);
  if (!mine.defined() || !mine.device().is_cpu() || mine.use_count() > 1) return;
  const auto bytes = static_cast<std::int64_t>(mine.nbytes());
  const std::lock_guard lock(mutex_);
  if (bytes_ + bytes > most_bytes_) return;
  bytes_ += bytes;
  spare_.push_back(std::move(mine));
}

std::int64_t SpareBuffers::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

}  // namespace unshard
