#include "comm/shm_lanes.h"

#include <array>

#include "unshard/core/error.h"

namespace unshard::comm {

namespace {

constexpr std::array<const char*, 8> kOps{"",          "all_gather", "reduce_scatter", "all_reduce",
                                          "broadcast", "all_to_all", "barrier",        "reduce_scatter_by_host"};
constexpr std::array<const char*, 3> kReductions{"sum", "max", "min"};

std::uint64_t op_number(std::string_view op) {
  for (std::size_t i = 1; i < kOps.size(); ++i)
    if (op == kOps[i]) return i;
  return 0;
}

}  // namespace

Signature make_signature(const Call& call, std::uint64_t bytes, int dtype, ReduceOp op, int root) {
  return {op_number(call.op) | static_cast<std::uint64_t>(op) << 8 | static_cast<std::uint64_t>(dtype) << 16 |
              static_cast<std::uint64_t>(root) << 32,
          bytes};
}

std::string describe_signature(const Signature& signature) {
  const auto op = signature.kind & 0xff, reduction = signature.kind >> 8 & 0xff, root = signature.kind >> 32;
  const auto dtype = static_cast<c10::ScalarType>(signature.kind >> 16 & 0xff);
  std::string text = cat(op < kOps.size() ? kOps[op] : "?", " of ", signature.bytes, " bytes ", c10::toString(dtype));
  if (op == 2 || op == 3) text += cat(", ", reduction < kReductions.size() ? kReductions[reduction] : "?");
  if (op == 4) text += cat(", root ", root);
  return text;
}

ShmLanes::ShmLanes(std::shared_ptr<HostGroupImpl> group) : group_(std::move(group)), rank_(group_->rank()), size_(group_->size()) {
  const auto ranks = static_cast<std::size_t>(size_);
  const std::size_t head = ranks * sizeof(Counters);
  const std::size_t lanes_at = (head + 4095) / 4096 * 4096;
  const std::size_t bytes = lanes_at + ranks * kSlots * kSlotBytes;
  segment_ = group_->create_segment("collectives", bytes, bytes);
  counters_ = reinterpret_cast<Counters*>(segment_->data());
  lanes_ = segment_->data() + lanes_at;
}

std::uint64_t ShmLanes::begin(const Signature& signature, std::uint64_t steps) {
  signature_ = signature;
  const std::size_t turn = ++collectives_ % 2;
  counters(rank_).kind[turn].store(signature.kind, std::memory_order_relaxed);
  counters(rank_).bytes[turn].store(signature.bytes, std::memory_order_relaxed);  // published by the first post()
  const std::uint64_t first = step_ + 1;
  step_ += steps;
  return first;
}

std::byte* ShmLanes::acquire(const Call& call, std::uint64_t step) {
  if (step > kSlots) {
    const std::uint64_t needed = step - kSlots;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;  // this rank may write ahead of its own reading: it reads its own tensor, not its lane
      const auto owes = [this, needed](int r) { return r != rank_ && counters(r).done.load(std::memory_order_acquire) < needed; };
      if (owes(peer)) group_->wait([&] { return !owes(peer); }, {call.op, call.detail}, {owes, {}});
    }
  }
  return slot(rank_, step);
}

void ShmLanes::post(std::uint64_t step) {
  counters(rank_).posted.store(step, std::memory_order_release);
  group_->notify();
}

void ShmLanes::wait_posted(const Call& call, int peer, std::uint64_t step) {
  const auto owes = [this, step](int r) { return counters(r).posted.load(std::memory_order_acquire) < step; };
  if (owes(peer)) group_->wait([&] { return !owes(peer); }, {call.op, call.detail}, {owes, {}});
}

const std::byte* ShmLanes::read(const Call& call, int peer, std::uint64_t step) {
  wait_posted(call, peer, step);
  return slot(peer, step);
}

void ShmLanes::done(std::uint64_t step) {
  counters(rank_).done.store(step, std::memory_order_release);
  group_->notify();
}

void ShmLanes::compare_signatures(const Call& call, std::uint64_t first_step) {
  const std::size_t turn = collectives_ % 2;
  for (int peer = 0; peer < size_; ++peer) {
    wait_posted(call, peer, first_step);
    const Signature theirs{counters(peer).kind[turn].load(std::memory_order_relaxed),
                           counters(peer).bytes[turn].load(std::memory_order_relaxed)};
    if (theirs == signature_) continue;
    throw CommError(cat(Place{call.op, call.detail}.text(), " step ", call.step, ": the ranks are in different collectives: rank ", rank_,
                        " in ", describe_signature(signature_), ", rank ", peer, " in ", describe_signature(theirs)));
  }
}

}  // namespace unshard::comm
