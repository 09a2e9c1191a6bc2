#pragma once
// Sums buckets over ranks. One pipeline feeds it at every stage; implementations differ in how bytes travel.
//
// [Note: rounds] A bucket is posted when all of its members have a gradient, when a member gets its second one, or at the drain. The k-th
// post of bucket b since the last drain is its round k. Ranks whose control flow differs have different numbers of rounds; a rank that has
// no round k of b adds nothing to it. The accumulator of a rank's own slice takes round after round, in each the ranks in rank order:
// the same additions in the same order for every stage, every transport and every timing. Where several hosts have several ranks, a round
// is the hosts' sums in order, each of them its ranks' in rank order and in the bucket's dtype.
//
// [Note: epochs] What is posted between two drains is an epoch. zero_grad ends an epoch too (discard): all ranks call it at the same place
// of their program, so that they count epochs alike; a rank that has contributed nothing follows the others.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "bucket_plan.h"

namespace unshard {

class Communicator;

struct ReducerOptions {
  /// Shared memory a rank sets aside for buckets on their way (less if the whole model needs less; at least two buckets). Where memory
  /// isn't shared: what it keeps of them for the next ones, at most.
  std::int64_t ring_bytes = 64 << 20;
  /// Reduce while backward goes on; false: everything in the drain.
  bool overlap = true;
  /// Called before each reduction (tests inject delays here).
  std::function<void(int bucket)> before_reduce;
  /// Called before a drain in shared memory sleeps, having found nothing to do (tests let peers go on here).
  std::function<void()> before_wait;
};

class Reducer {
 public:
  /// Takes the slices that this rank owns, of one round of a bucket, from the ranks that took part, in rank order (or one a host, summed
  /// over its ranks). Rounds of a bucket come in order. Called from the thread that polls or drains, or from the reducer's own; never from
  /// two at once, never after drain returns.
  using Sink = std::function<void(int bucket, const std::vector<at::Tensor>& slices)>;

  virtual ~Reducer() = default;
  /// Memory for the next round of `bucket`, [world_size * slice_numel]; stays valid until post(). May wait for peers, see SharedReducer.
  virtual at::Tensor begin(int bucket) = 0;
  /// The memory of begin() is full: hand it over.
  virtual void post(int bucket) = 0;
  /// Do what can be done without waiting.
  virtual void poll() = 0;
  /// The epoch ends without a result. Memory begun and not posted is taken back.
  virtual void discard() = 0;
  /// Collective. On return the sink has had every round of every rank. A collective call must follow before the next drain.
  /// \throws CommError a peer is gone or has discarded a different number of times, naming it.
  virtual void drain() = 0;
  /// After a drain, before the collective call that follows it: the rank whose last round of `bucket` has a non-finite value in
  /// elements [offset, offset + numel) of this rank's slice, or -1 if that isn't known any more.
  virtual int find_nonfinite(int /*bucket*/, std::int64_t /*offset*/, std::int64_t /*numel*/) { return -1; }
  /// Memory held for buckets on this rank.
  virtual std::int64_t bytes() const = 0;
};

/// A world of one.
std::unique_ptr<Reducer> make_local_reducer(const BucketPlan& plan, c10::Device device, Reducer::Sink sink, const ReducerOptions& options);
/// Ranks that share memory (comm.host()); CPU tensors. Collective.
std::unique_ptr<Reducer> make_shared_reducer(const BucketPlan& plan, Communicator& comm, Reducer::Sink sink, const ReducerOptions& options);
/// Any ranks, any device: one exchange a round, from a thread of its own, hosts first. Collective.
std::unique_ptr<Reducer> make_collective_reducer(const BucketPlan& plan, std::shared_ptr<Communicator> comm, c10::Device device,
                                                 Reducer::Sink sink, const ReducerOptions& options);
/// The one that fits. Collective.
std::unique_ptr<Reducer> make_reducer(const BucketPlan& plan, std::shared_ptr<Communicator> comm, c10::Device device, Reducer::Sink sink,
                                      const ReducerOptions& options);

}  // namespace unshard
