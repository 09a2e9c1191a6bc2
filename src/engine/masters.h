#pragma once
// fp32 master weights of parameters that compute in 16 bits: this rank's pieces, or whole at stage 0. One arena for what is trained from
// the start; parameters unfrozen later get theirs then, from the 16-bit values.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "unshard/zero/layout.h"

namespace unshard {

class Masters {
 public:
  Masters(int rank, bool whole, c10::Device device) : rank_(rank), whole_(whole), device_(device) {}
  /// Set aside memory for these parameters, by id.
  void reserve(const std::vector<std::pair<int, ShardLayout>>& parameters);
  bool has(int parameter) const;
  /// Take values from the whole flat parameter (any dtype, storage order).
  void set_whole(int parameter, const at::Tensor& flat);
  /// What the optimizer updates: whole at stage 0, else the piece. Undefined without a master.
  at::Tensor domain(int parameter) const;
  at::Tensor piece(int parameter) const;
  std::int64_t bytes() const { return bytes_; }
  void move_to(c10::Device device);

 private:
  struct Entry {
    at::Tensor memory;
    ShardLayout layout;
  };
  const int rank_;
  const bool whole_;
  c10::Device device_;
  std::vector<Entry> entries_;  // by parameter id
  std::int64_t bytes_ = 0;
};

}  // namespace unshard
