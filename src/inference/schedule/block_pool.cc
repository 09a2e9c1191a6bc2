#include "inference/schedule/block_pool.h"

#include "unshard/core/error.h"

namespace unshard::inference {

BlockPool::BlockPool(std::int64_t blocks) : slots_(static_cast<std::size_t>(blocks)) {
  for (std::int64_t b = blocks - 1; b >= 0; --b) free_.push_back(static_cast<std::int32_t>(b));
}

BlockPool::Taken BlockPool::take() {
  Taken taken;
  if (!free_.empty()) {
    taken.block = free_.back();
    free_.pop_back();
  } else if (oldest_ >= 0) {
    taken = {oldest_, true};
    unlink_kept(oldest_);
  } else {
    return taken;
  }
  Slot& slot = at(taken.block);
  slot.users = 1;
  slot.state = BlockState::used;
  slot.known = false;
  ++used_;
  return taken;
}

void BlockPool::retain(std::int32_t block) {
  Slot& slot = at(block);
  UNSHARD_DCHECK(slot.state != BlockState::free, "block ", block);
  if (slot.state == BlockState::kept) {
    unlink_kept(block);
    slot.state = BlockState::used;
    ++used_;
  }
  ++slot.users;
}

void BlockPool::release(std::int32_t block) {
  Slot& slot = at(block);
  UNSHARD_DCHECK(slot.state == BlockState::used, "block ", block);
  if (--slot.users > 0) return;
  --used_;
  if (slot.known) {
    slot.state = BlockState::kept;
    append_kept(block);
  } else {
    slot.state = BlockState::free;
    free_.push_back(block);
  }
}

void BlockPool::mark_known(std::int32_t block) {
  UNSHARD_DCHECK(at(block).state == BlockState::used, "block ", block);
  at(block).known = true;
}

void BlockPool::append_kept(std::int32_t block) {
  at(block).older = newest_;
  at(block).newer = -1;
  if (newest_ >= 0) at(newest_).newer = block;
  newest_ = block;
  if (oldest_ < 0) oldest_ = block;
}

void BlockPool::unlink_kept(std::int32_t block) {
  const Slot& slot = at(block);
  (slot.older >= 0 ? at(slot.older).newer : oldest_) = slot.newer;
  (slot.newer >= 0 ? at(slot.newer).older : newest_) = slot.older;
}

void BlockPool::check() const {
  std::int64_t in_state[3] = {};
  for (std::size_t b = 0; b < slots_.size(); ++b) {
    const Slot& slot = slots_[b];
    ++in_state[static_cast<int>(slot.state)];
    UNSHARD_DCHECK((slot.users > 0) == (slot.state == BlockState::used), "block ", b);
    UNSHARD_DCHECK(slot.state != BlockState::kept || slot.known, "block ", b);
  }
  UNSHARD_DCHECK(in_state[static_cast<int>(BlockState::used)] == used_);
  UNSHARD_DCHECK(in_state[static_cast<int>(BlockState::free)] == static_cast<std::int64_t>(free_.size()));
  for (const std::int32_t b : free_) UNSHARD_DCHECK(state(b) == BlockState::free, "block ", b);
  std::int64_t kept = 0;
  for (std::int32_t b = oldest_, older = -1; b >= 0; older = b, b = slots_[static_cast<std::size_t>(b)].newer) {
    UNSHARD_DCHECK(state(b) == BlockState::kept && slots_[static_cast<std::size_t>(b)].older == older, "block ", b);
    ++kept;
  }
  UNSHARD_DCHECK(kept == in_state[static_cast<int>(BlockState::kept)]);
}

}  // namespace unshard::inference
