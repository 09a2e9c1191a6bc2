#include "bucket_plan.h"

#include <algorithm>
#include <map>
#include <utility>

#include "unshard/core/error.h"

namespace unshard {
namespace {

class Planner {
 public:
  Planner(int world_size, std::int64_t bucket_numel) : slice_limit_(std::max<std::int64_t>(1, bucket_numel / world_size)) {
    plan_.world_size = world_size;
  }

  void add(const PlannedParameter& parameter) {
    const auto id = static_cast<std::size_t>(parameter.id);
    if (plan_.places.size() <= id) {
      plan_.places.resize(id + 1);
      plan_.span_offsets.resize(id + 1);
      plan_.layouts.resize(id + 1);
    }
    UNSHARD_DCHECK(plan_.places[id].empty(), parameter.name, " was planned twice");
    plan_.layouts[id] = parameter.layout;
    if (parameter.layout.numel == 0) return;
    if (parameter.layout.shard_numel() > slice_limit_) {
      add_large(parameter);
    } else {
      add_small(parameter);
    }
  }

  BucketPlan finish() {
    for (auto& bucket : plan_.buckets) {
      plan_.spans[bucket.span].numel = std::max(plan_.spans[bucket.span].numel, bucket.span_offset + bucket.slice_numel);
      if (bucket.members.size() > 1) bucket.label += cat(".. (", bucket.members.size(), ")");
    }
    return std::move(plan_);
  }

 private:
  int new_span(bool active) {
    plan_.spans.push_back({0, active});
    return static_cast<int>(plan_.spans.size()) - 1;
  }

  int new_bucket(const PlannedParameter& parameter, int span, std::int64_t span_offset) {
    plan_.buckets.push_back({parameter.dtype, 0, {}, span, span_offset, parameter.name});
    return static_cast<int>(plan_.buckets.size()) - 1;
  }

  void put(const PlannedParameter& parameter, int index, std::int64_t piece_begin, std::int64_t count) {
    auto& bucket = plan_.buckets[index];
    bucket.members.push_back({parameter.id, piece_begin, count, bucket.slice_numel});
    bucket.slice_numel += count;
    plan_.places[parameter.id].push_back({index, static_cast<int>(bucket.members.size()) - 1});
  }

  void add_large(const PlannedParameter& parameter) {
    const int span = new_span(parameter.active);
    const auto shard = parameter.layout.shard_numel();
    for (std::int64_t begin = 0; begin < shard; begin += slice_limit_) {
      put(parameter, new_bucket(parameter, span, begin), begin, std::min(slice_limit_, shard - begin));
    }
    plan_.span_offsets[parameter.id] = 0;
  }

  void add_small(const PlannedParameter& parameter) {
    const auto shard = parameter.layout.shard_numel();
    auto [open, fresh] = open_.try_emplace({parameter.dtype, parameter.active}, -1);
    if (fresh || plan_.buckets[open->second].slice_numel + shard > slice_limit_) {
      open->second = new_bucket(parameter, new_span(parameter.active), 0);
    }
    plan_.span_offsets[parameter.id] = plan_.buckets[open->second].slice_numel;
    put(parameter, open->second, 0, shard);
  }

  const std::int64_t slice_limit_;
  BucketPlan plan_;
  std::map<std::pair<c10::ScalarType, bool>, int> open_;  // the bucket that still has room, by kind
};

}  // namespace

std::int64_t BucketPlan::bucket_bytes(int bucket) const {
  return buckets[bucket].slice_numel * world_size * static_cast<std::int64_t>(c10::elementSize(buckets[bucket].dtype));
}

std::int64_t BucketPlan::largest_bucket_bytes() const {
  std::int64_t largest = 0;
  for (int b = 0; b < static_cast<int>(buckets.size()); ++b) largest = std::max(largest, bucket_bytes(b));
  return largest;
}

BucketPlan plan_buckets(const std::vector<PlannedParameter>& parameters, int world_size, std::int64_t bucket_numel) {
  Planner planner(world_size, bucket_numel);
  for (auto parameter = parameters.rbegin(); parameter != parameters.rend(); ++parameter) planner.add(*parameter);
  return planner.finish();
}

}  // namespace unshard
