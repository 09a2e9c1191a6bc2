#include "comm/host_slots.h"

#include <ATen/ops/from_blob.h>

#include "unshard/core/error.h"

namespace unshard::comm {

HostSlots::HostSlots(std::shared_ptr<HostGroupImpl> group)
    : group_(std::move(group)),
      rank_(group_->rank()),
      size_(group_->size()),
      slot_bytes_((static_cast<std::size_t>(size_) + 1) * kLaneBytes) {
  const std::size_t head = (static_cast<std::size_t>(size_) * 2 * sizeof(Cell) + 4095) / 4096 * 4096;
  const std::size_t bytes = head + kSlots * slot_bytes_;
  segment_ = group_->create_segment("across hosts", head, bytes);
  cells_ = reinterpret_cast<Cell*>(segment_->data());
  slots_ = segment_->data() + head;
}

// Memory comes with the first collective: many groups never have one.
std::byte* HostSlots::take() {
  if (turns_ == 0) segment_->reserve(static_cast<std::size_t>(slots_ - segment_->data()) + kSlots * slot_bytes_);
  return slots_ + turns_++ % kSlots * slot_bytes_;
}

// A cell is written again two meetings later: by then all ranks have come to the one between, after they compared.
void HostSlots::meet(const Call& call, const Signature& signature) {
  const std::uint64_t meeting = meetings_++;
  cell(rank_, meeting).kind.store(signature.kind, std::memory_order_relaxed);
  cell(rank_, meeting).bytes.store(signature.bytes, std::memory_order_relaxed);  // published by the barrier
  if (size_ == 1) return;
  group_->barrier(call.detail.empty() ? std::string(call.op) : cat(call.op, " '", call.detail, "'"));
  for (int peer = 0; peer < size_; ++peer) {
    const Signature theirs{cell(peer, meeting).kind.load(std::memory_order_relaxed),
                           cell(peer, meeting).bytes.load(std::memory_order_relaxed)};
    if (theirs == signature) continue;
    throw CommError(cat(Place{call.op, call.detail}.text(), " step ", call.step, ": the ranks are in different collectives: rank ",
                        group_->name(rank_), " in ", describe_signature(signature), ", rank ", group_->name(peer), " in ",
                        describe_signature(theirs)));
  }
}

at::Tensor HostSlots::over(std::byte* data, std::size_t bytes) const {
  return at::from_blob(
      data, {static_cast<std::int64_t>(bytes)}, [segment = segment_](void*) {}, at::TensorOptions().dtype(at::kByte));
}

}  // namespace unshard::comm
