// The reducer of a world of one: a posted bucket goes to the accumulator at once.
#include <utility>

#include "flat.h"
#include "reducer.h"
#include "unshard/comm/communicator.h"
#include "unshard/comm/host_group.h"
#include "unshard/core/error.h"

namespace unshard {
namespace {

class LocalReducer final : public Reducer {
 public:
  LocalReducer(const BucketPlan& plan, c10::Device device, Sink sink, const ReducerOptions& options)
      : plan_(plan), device_(device), sink_(std::move(sink)), options_(options), begun_(plan.buckets.size()) {}

  at::Tensor begin(int bucket) override {
    const auto& planned = plan_.buckets[bucket];
    begun_[bucket] = flat::empty(planned.slice_numel * plan_.world_size, planned.dtype, device_);
    bytes_ += plan_.bucket_bytes(bucket);
    return begun_[bucket];
  }

  void post(int bucket) override {
    if (options_.before_reduce) options_.before_reduce(bucket);
    sink_(bucket, {begun_[bucket]});
    drop(bucket);
  }

  void poll() override {}
  void discard() override {
    for (int b = 0; b < static_cast<int>(begun_.size()); ++b) drop(b);
  }
  void drain() override {}
  std::int64_t bytes() const override { return bytes_; }

 private:
  void drop(int bucket) {
    if (!begun_[bucket].defined()) return;
    begun_[bucket] = at::Tensor();
    bytes_ -= plan_.bucket_bytes(bucket);
  }

  const BucketPlan& plan_;
  const c10::Device device_;
  const Sink sink_;
  const ReducerOptions options_;
  std::vector<at::Tensor> begun_;
  std::int64_t bytes_ = 0;
};

}  // namespace

std::unique_ptr<Reducer> make_local_reducer(const BucketPlan& plan, c10::Device device, Reducer::Sink sink, const ReducerOptions& options) {
  UNSHARD_DCHECK(plan.world_size == 1, plan.world_size);
  return std::make_unique<LocalReducer>(plan, device, std::move(sink), options);
}

std::unique_ptr<Reducer> make_reducer(const BucketPlan& plan, std::shared_ptr<Communicator> comm, c10::Device device, Reducer::Sink sink,
                                      const ReducerOptions& options) {
  if (comm->world_size() == 1) return make_local_reducer(plan, device, std::move(sink), options);
  if (comm->host() && device.is_cpu()) return make_shared_reducer(plan, *comm, std::move(sink), options);
  return make_collective_reducer(plan, std::move(comm), device, std::move(sink), options);
}

}  // namespace unshard
