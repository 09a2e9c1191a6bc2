#include "gradient_pipeline.h"

#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <utility>

#include "flat.h"
#include "unshard/comm/communicator.h"
#include "unshard/core/error.h"

namespace unshard {
namespace {

bool is_contiguous(const Geometry& geometry) {
  std::int64_t expected = 1;
  for (std::size_t d = geometry.sizes.size(); d-- > 0;) {
    if (geometry.sizes[d] != 1 && geometry.strides[d] != expected) return false;
    expected *= geometry.sizes[d];
  }
  return true;
}

// The gradient's elements in the parameter's storage order, flat; its own memory where that has this order already.
at::Tensor in_storage_order(const at::Tensor& grad, const Geometry& geometry) {
  UNSHARD_DCHECK(grad.sizes() == at::IntArrayRef(geometry.sizes), "gradient of shape ", grad.sizes());
  const bool same = (grad.is_contiguous() && is_contiguous(geometry)) || grad.strides() == at::IntArrayRef(geometry.strides);
  at::Tensor ordered = grad;
  if (!same) {
    ordered = at::empty_strided(geometry.sizes, geometry.strides, grad.options().requires_grad(c10::nullopt));
    ordered.copy_(grad.detach());
  }
  if (!ordered.device().is_cpu()) return flat::storage_view(ordered);
  // Through the address, so that no operator is called for the usual case.
  return flat::slice(ordered, 0, ordered.numel());
}

}  // namespace

GradientPipeline::GradientPipeline(const BucketPlan& plan, Gradients& gradients, std::unique_ptr<Reducer> reducer,
                                   std::vector<Geometry> geometries)
    : plan_(plan),
      gradients_(gradients),
      reducer_(std::move(reducer)),
      geometries_(std::move(geometries)),
      filling_(plan.buckets.size()),
      present_(geometries_.size()) {
  for (std::size_t b = 0; b < filling_.size(); ++b) filling_[b].filled.resize(plan.buckets[b].members.size());
}

GradientPipeline::Range GradientPipeline::range(int parameter, const MemberPlace& place, int rank) const {
  const auto& bucket = plan_.buckets[place.bucket];
  const auto& member = bucket.members[place.member];
  const auto& layout = plan_.layouts[parameter];
  const auto first = std::min(layout.numel, layout.shard_numel() * rank + member.piece_begin);
  return {first, std::min(member.count, layout.numel - first),
          flat::slice(filling_[place.bucket].memory, bucket.slice_numel * rank + member.offset, member.count)};
}

void GradientPipeline::open(const MemberPlace& place) {
  auto& filling = filling_[place.bucket];
  // A second gradient of one parameter is a new round, so that sums are made in fp32, not in the bucket.
  if (filling.memory.defined() && filling.filled[place.member]) post(place.bucket);
  if (filling.memory.defined()) return;
  filling.memory = reducer_->begin(place.bucket);
  std::fill(filling.filled.begin(), filling.filled.end(), 0);
  filling.missing = static_cast<int>(filling.filled.size());
}

void GradientPipeline::post(int index) {
  auto& filling = filling_[index];
  if (filling.missing > 0) {
    const auto& bucket = plan_.buckets[index];
    for (int m = 0; m < static_cast<int>(bucket.members.size()); ++m) {
      if (filling.filled[m]) continue;
      for (int r = 0; r < plan_.world_size; ++r) flat::fill_zero(range(bucket.members[m].parameter, {index, m}, r).memory);
    }
  }
  filling.memory = at::Tensor();
  reducer_->post(index);
}

void GradientPipeline::write_dense(int parameter, const MemberPlace& place, const at::Tensor& flat, double factor) {
  for (int r = 0; r < plan_.world_size; ++r) {
    const auto target = range(parameter, place, r);
    if (target.numel > 0) {
      flat::copy(flat::slice(target.memory, 0, target.numel), flat::slice(flat, target.first, target.numel), factor);
    }
    const auto padding = target.memory.numel() - target.numel;
    if (padding > 0) flat::fill_zero(flat::slice(target.memory, target.numel, padding));
  }
}

// `rows`: sorted row numbers, distinct; `values`: [rows, elements of a row], contiguous.
void GradientPipeline::write_rows(int parameter, const MemberPlace& place, const at::Tensor& rows, const at::Tensor& values,
                                  double factor) {
  const std::int64_t width = rows.numel() == 0 ? 0 : values.numel() / rows.numel();
  const auto* numbers = rows.const_data_ptr<std::int64_t>();
  const auto elements = flat::slice(values, 0, values.numel());
  for (int r = 0; r < plan_.world_size; ++r) {
    const auto target = range(parameter, place, r);
    flat::fill_zero(target.memory);
    if (width == 0) continue;
    const auto end = target.first + target.numel;
    const auto* row = std::lower_bound(numbers, numbers + rows.numel(), target.first / width);
    for (; row != numbers + rows.numel() && *row * width < end; ++row) {
      const auto first = std::max(*row * width, target.first), last = std::min((*row + 1) * width, end);
      if (first >= last) continue;
      flat::copy(flat::slice(target.memory, first - target.first, last - first),
                 flat::slice(elements, (row - numbers) * width + first - *row * width, last - first), factor);
    }
  }
}

void GradientPipeline::contribute(int parameter, const at::Tensor& grad, double factor) {
  const auto& geometry = geometries_[parameter];
  at::Tensor flat, rows, values;
  if (grad.is_sparse() && grad.sparse_dim() == 1 && grad.device().is_cpu() && is_contiguous(geometry)) {
    const auto sum = grad.detach().coalesce();
    rows = sum.indices().select(0, 0).contiguous();
    values = sum.values().contiguous();
  } else {
    flat = in_storage_order(grad.layout() == c10::kStrided ? grad : grad.detach().to_dense(), geometry);
  }
  const std::lock_guard lock(mutex_);
  for (const auto& place : plan_.places[parameter]) {
    open(place);
    if (flat.defined()) {
      write_dense(parameter, place, flat, factor);
    } else {
      write_rows(parameter, place, rows, values, factor);
    }
    auto& filling = filling_[place.bucket];
    filling.filled[place.member] = 1;
    if (--filling.missing == 0) post(place.bucket);
  }
  present_[parameter] = 1;
  any_present_ = true;
  reducer_->poll();
}

void GradientPipeline::drain(Communicator& comm) {
  const std::lock_guard lock(mutex_);
  for (int b = 0; b < static_cast<int>(filling_.size()); ++b) {
    if (filling_[b].memory.defined()) post(b);
  }
  if (comm.host()) {  // elsewhere the collectives inside are recorded
    const auto sequence = comm.recorder().begin("drain", "gradients of the step", 0, comm.step());
    reducer_->drain();
    comm.recorder().end(sequence);
  } else {
    reducer_->drain();
  }
  gradients_.gather(comm);
}

void GradientPipeline::discard() {
  const std::lock_guard lock(mutex_);
  for (auto& filling : filling_) filling.memory = at::Tensor();
  reducer_->discard();
  gradients_.reset();
  std::fill(present_.begin(), present_.end(), 0);
  any_present_ = false;
}

void GradientPipeline::clear() {
  const std::lock_guard lock(mutex_);
  gradients_.reset();
  std::fill(present_.begin(), present_.end(), 0);
  any_present_ = false;
}

}  // namespace unshard
