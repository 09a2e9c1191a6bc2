#pragma once
// Collectives of ranks that share a host's memory, for CPU tensors.
#include <memory>

#include "comm/shm_lanes.h"
#include "comm/shm_mailbox.h"
#include "comm/transport.h"

namespace unshard::comm {

class ShmTransport final : public Transport {
 public:
  /// Collective.
  explicit ShmTransport(const std::shared_ptr<HostGroupImpl>& group);

  void all_gather(const Call& call, at::Tensor& output, const at::Tensor& input) override;
  void reduce_scatter(const Call& call, at::Tensor& output, const at::Tensor& input, ReduceOp op) override;
  void all_reduce(const Call& call, at::Tensor& tensor, ReduceOp op) override;
  void broadcast(const Call& call, at::Tensor& tensor, int root) override;
  void all_to_all(const Call& call, at::Tensor& output, const at::Tensor& input) override;
  void reduce_scatter_by_host(const Call& call, at::Tensor& output, const at::Tensor& input) override {
    reduce_scatter(call, output, input, ReduceOp::sum);
  }
  void send(const Call& call, const at::Tensor& tensor, int destination, int tag) override;
  void recv(const Call& call, at::Tensor& tensor, int source, int tag) override;

 private:
  struct Split;
  void all_reduce_whole(const Call& call, at::Tensor& tensor, ReduceOp op, const Signature& signature);
  void all_reduce_sliced(const Call& call, at::Tensor& tensor, ReduceOp op, const Signature& signature);

  ShmLanes lanes_;
  ShmMailbox mailbox_;
  const int rank_, size_;
};

}  // namespace unshard::comm
