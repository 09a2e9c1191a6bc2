#include "gradients.h"

#include <algorithm>

#include "flat.h"
#include "unshard/comm/communicator.h"
#include "unshard/core/error.h"

namespace unshard {

// [Note: places in a span] Of a span's slice, parameter p takes shard_numel(p) elements from span_offsets[p] on. Keeping own pieces only, a
// span's memory is that slice. Keeping whole gradients it is world_size times as long, and p's padded whole value takes the elements from
// world_size * span_offsets[p] on: contiguous, in flat order, so that the optimizer sees one flat tensor.

Gradients::Gradients(const BucketPlan& plan, int rank, bool whole, c10::ScalarType dtype, c10::Device device)
    : plan_(plan),
      rank_(rank),
      whole_(whole),
      dtype_(dtype),
      device_(device),
      spans_(plan.spans.size()),
      started_(plan.buckets.size()),
      gathered_(plan.buckets.size()) {
  const std::int64_t factor = whole_ ? plan_.world_size : 1;
  std::int64_t total = 0;
  for (const auto& span : plan_.spans) total += span.active ? span.numel * factor : 0;
  const auto arena = flat::empty(total, dtype_, device_);
  bytes_ = total * static_cast<std::int64_t>(c10::elementSize(dtype_));
  std::int64_t offset = 0;
  for (std::size_t s = 0; s < spans_.size(); ++s) {
    if (!plan_.spans[s].active) continue;
    spans_[s] = flat::slice(arena, offset, plan_.spans[s].numel * factor);
    offset += plan_.spans[s].numel * factor;
  }
}

void Gradients::allocate(int span) {
  if (spans_[span].defined()) return;
  const auto numel = plan_.spans[span].numel * (whole_ ? plan_.world_size : 1);
  spans_[span] = flat::empty(numel, dtype_, device_);
  bytes_ += numel * static_cast<std::int64_t>(c10::elementSize(dtype_));
}

int Gradients::span_of(int parameter) const {
  const auto& places = plan_.places[parameter];
  return places.empty() ? -1 : plan_.buckets[places.front().bucket].span;
}

std::int64_t Gradients::base(int parameter) const { return plan_.span_offsets[parameter] * (whole_ ? plan_.world_size : 1); }

void Gradients::add(int index, const std::vector<at::Tensor>& slices) {
  const auto& bucket = plan_.buckets[index];
  allocate(bucket.span);
  const bool first = !started_[index];
  started_[index] = 1;
  gathered_[index] = 0;
  const auto& memory = spans_[bucket.span];
  if (!whole_) {
    flat::accumulate(flat::slice(memory, bucket.span_offset, bucket.slice_numel), slices, first);
    return;
  }
  std::vector<at::Tensor> inputs(slices.size());
  for (const auto& member : bucket.members) {
    for (std::size_t r = 0; r < slices.size(); ++r) inputs[r] = flat::slice(slices[r], member.offset, member.count);
    const auto own = base(member.parameter) + plan_.layouts[member.parameter].shard_numel() * rank_ + member.piece_begin;
    flat::accumulate(flat::slice(memory, own, member.count), inputs, first);
  }
}

void Gradients::gather_bucket(Communicator& comm, int index) {
  const auto& bucket = plan_.buckets[index];
  const auto& memory = spans_[bucket.span];
  auto mine = flat::empty(bucket.slice_numel, dtype_, device_);
  auto all = flat::empty(bucket.slice_numel * plan_.world_size, dtype_, device_);
  const auto place = [&](const BucketMember& member, int rank) {
    const auto begin = base(member.parameter) + plan_.layouts[member.parameter].shard_numel() * rank + member.piece_begin;
    return flat::slice(memory, begin, member.count);
  };
  for (const auto& member : bucket.members) flat::copy(flat::slice(mine, member.offset, member.count), place(member, rank_));
  comm.all_gather(all, mine, bucket.label);
  for (const auto& member : bucket.members) {
    for (int r = 0; r < plan_.world_size; ++r) {
      if (r == rank_) continue;
      flat::copy(place(member, r), flat::slice(all, bucket.slice_numel * r + member.offset, member.count));
    }
  }
}

void Gradients::gather(Communicator& comm) {
  if (!whole_ || plan_.world_size == 1) return;
  for (int b = 0; b < static_cast<int>(plan_.buckets.size()); ++b) {
    if (!started_[b] || gathered_[b]) continue;
    gather_bucket(comm, b);
    gathered_[b] = 1;
  }
}

void Gradients::reset() {
  std::fill(started_.begin(), started_.end(), 0);
  std::fill(gathered_.begin(), gathered_.end(), 0);
}

bool Gradients::has(int parameter) const {
  const auto& places = plan_.places[parameter];
  return !places.empty() && started_[places.front().bucket];
}

void Gradients::ensure(int parameter) {
  for (const auto& place : plan_.places[parameter]) {
    if (started_[place.bucket]) continue;
    const auto& bucket = plan_.buckets[place.bucket];
    allocate(bucket.span);
    if (whole_) {
      for (const auto& member : bucket.members) {
        const auto shard = plan_.layouts[member.parameter].shard_numel();
        for (int r = 0; r < plan_.world_size; ++r) {
          flat::fill_zero(flat::slice(spans_[bucket.span], base(member.parameter) + shard * r + member.piece_begin, member.count));
        }
      }
    } else {
      flat::fill_zero(flat::slice(spans_[bucket.span], bucket.span_offset, bucket.slice_numel));
    }
    started_[place.bucket] = gathered_[place.bucket] = 1;
  }
}

at::Tensor Gradients::piece(int parameter) {
  const int span = span_of(parameter);
  const auto& layout = plan_.layouts[parameter];
  if (span < 0) return flat::empty(0, dtype_, device_);
  allocate(span);
  return flat::slice(spans_[span], base(parameter) + (whole_ ? layout.shard_numel() * rank_ : 0), layout.size(rank_));
}

at::Tensor Gradients::domain(int parameter) {
  const int span = span_of(parameter);
  if (!whole_ || span < 0) return piece(parameter);
  allocate(span);
  return flat::slice(spans_[span], base(parameter), plan_.layouts[parameter].numel);
}

void Gradients::move_to(c10::Device device) {
  if (device == device_) return;
  device_ = device;
  for (auto& span : spans_) {
    if (span.defined()) span = span.to(device);
  }
}

}  // namespace unshard
