#pragma once
// What moves a collective's bytes: shared memory or c10d. Arguments are checked by the Communicator before they come here.
#include <ATen/core/Tensor.h>

#include <string_view>

#include "unshard/comm/communicator.h"

namespace unshard::comm {

/// The call being served, for messages.
struct Call {
  std::string_view op, detail;
  std::int64_t step = 0;
  int peer = -1;  ///< of a send or recv
  bool is_pair() const { return peer >= 0; }
};

/// Tensors are contiguous, flat ([numel]) and all of one device that this transport serves. A group of at least two ranks.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual void all_gather(const Call& call, at::Tensor& output, const at::Tensor& input) = 0;
  virtual void reduce_scatter(const Call& call, at::Tensor& output, const at::Tensor& input, ReduceOp op) = 0;
  virtual void all_reduce(const Call& call, at::Tensor& tensor, ReduceOp op) = 0;
  virtual void broadcast(const Call& call, at::Tensor& tensor, int root) = 0;
  virtual void all_to_all(const Call& call, at::Tensor& output, const at::Tensor& input) = 0;
  /// See Communicator.
  virtual void reduce_scatter_by_host(const Call& call, at::Tensor& output, const at::Tensor& input) = 0;
  virtual void send(const Call& call, const at::Tensor& tensor, int destination, int tag) = 0;
  virtual void recv(const Call& call, at::Tensor& tensor, int source, int tag) = 0;
};

}  // namespace unshard::comm
