#pragma once
// Where gradients add up: fp32 (or grad_accum_dtype) sums over ranks, rounds and micro-batches. ZeRO's stages differ here in one thing:
// stage 0 keeps whole gradients, all others only this rank's pieces.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "bucket_plan.h"

namespace unshard {

class Communicator;

class Gradients {
 public:
  /// Memory of the active spans is set aside now. `plan` must outlive this.
  Gradients(const BucketPlan& plan, int rank, bool whole, c10::ScalarType dtype, c10::Device device);

  /// This rank's slices of one round of `bucket`, from the ranks that took part, in rank order.
  void add(int bucket, const std::vector<at::Tensor>& slices);
  /// Collective, stage 0: bring in the other ranks' pieces of every bucket that had a round since the last call.
  void gather(Communicator& comm);
  /// Nothing has been added. Memory stays.
  void reset();

  /// Whether any rank sent anything for this parameter's buckets since reset(); the same on all ranks after a drain.
  bool has(int parameter) const;
  /// Make has() true, with zeros where nothing was added (for writing a gradient by hand).
  void ensure(int parameter);
  /// This rank's piece, flat, without padding.
  at::Tensor piece(int parameter);
  /// What the optimizer updates: the whole flat gradient at stage 0, else the piece.
  at::Tensor domain(int parameter);
  bool is_whole() const { return whole_; }
  c10::ScalarType dtype() const { return dtype_; }
  std::int64_t bytes() const { return bytes_; }
  void move_to(c10::Device device);

 private:
  void allocate(int span);
  std::int64_t base(int parameter) const;  // where a parameter's memory starts in its span's
  int span_of(int parameter) const;
  void gather_bucket(Communicator& comm, int bucket);

  const BucketPlan& plan_;
  const int rank_;
  const bool whole_;
  const c10::ScalarType dtype_;
  c10::Device device_;
  std::vector<at::Tensor> spans_;       // by span; undefined: not allocated
  std::vector<std::uint8_t> started_;   // by bucket: had a round since reset()
  std::vector<std::uint8_t> gathered_;  // by bucket: the other ranks' pieces are current
  std::int64_t bytes_ = 0;
};

}  // namespace unshard
