#pragma once
// From a parameter's gradient to the accumulators: copies contributions to their place in the bucket, posts buckets, ends the epoch. The
// same for every stage, precision and transport.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "bucket_plan.h"
#include "gradients.h"
#include "reducer.h"

namespace unshard {

class Communicator;

/// Shape and strides of a parameter: how its gradient is laid out flat.
struct Geometry {
  std::vector<std::int64_t> sizes, strides;
};

class GradientPipeline {
 public:
  /// \param geometries by parameter id. `plan` and `gradients` must outlive this; the reducer's sink must be gradients.add.
  GradientPipeline(const BucketPlan& plan, Gradients& gradients, std::unique_ptr<Reducer> reducer, std::vector<Geometry> geometries);

  /// Add grad * factor. Any layout (dense in any strides, sparse). Any thread. May wait for peers when the bucket ring is full.
  void contribute(int parameter, const at::Tensor& grad, double factor);
  /// Collective: partial buckets are posted, all rounds of all ranks added, whole gradients gathered at stage 0. A collective call must
  /// follow before the next drain.
  void drain(Communicator& comm);
  /// What was contributed since the last clear() is dropped; see [Note: epochs] in reducer.h.
  void discard();
  /// The update is done: start from nothing.
  void clear();

  /// By parameter: contributed on this rank since the last clear() or discard().
  const std::vector<std::uint8_t>& present() const { return present_; }
  bool any_present() const { return any_present_; }
  /// A gradient was written by hand.
  void mark_present(int parameter) { present_[parameter] = any_present_ = true; }
  Reducer& reducer() { return *reducer_; }

 private:
  struct Filling {
    at::Tensor memory;                 // undefined: the bucket has no open round
    std::vector<std::uint8_t> filled;  // by member
    int missing = 0;
  };
  void open(const MemberPlace& place);
  void post(int bucket);
  void write_dense(int parameter, const MemberPlace& place, const at::Tensor& flat, double factor);
  void write_rows(int parameter, const MemberPlace& place, const at::Tensor& rows, const at::Tensor& values, double factor);
  /// [first, first + numel) of the flat parameter that `place` holds for rank r; numel is clipped at the parameter's end.
  struct Range {
    std::int64_t first = 0, numel = 0;
    at::Tensor memory;  // [member.count] of rank r's slice
  };
  Range range(int parameter, const MemberPlace& place, int rank) const;

  const BucketPlan& plan_;
  Gradients& gradients_;
  std::unique_ptr<Reducer> reducer_;
  const std::vector<Geometry> geometries_;
  std::mutex mutex_;
  std::vector<Filling> filling_;  // by bucket
  std::vector<std::uint8_t> present_;
  bool any_present_ = false;
};

}  // namespace unshard
