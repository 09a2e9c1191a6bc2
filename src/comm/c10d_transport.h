#pragma once
// Collectives over a c10d process group: Gloo for CPU tensors, NCCL for CUDA tensors.
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "comm/transport.h"

namespace c10d {
class Backend;
class ProcessGroup;
class Work;
}  // namespace c10d

namespace unshard::comm {

struct C10dOptions {
  std::chrono::duration<double> timeout{1800};
  std::function<void()> interrupt_check;
  std::function<void(std::int64_t bytes)> sent;  ///< called with what each operation on CPU tensors sends to other ranks
  /// What is known of peers that ended: "rank 2 is gone (...)", or empty. `also_in_order`: those that took their leave too.
  std::function<std::string(bool also_in_order)> ended;
  std::function<void(const Call& call, double waited_s)> waiting = {};  ///< called about every 50 ms of a wait; throws to leave it
  std::function<std::string(const Call& call)> explain = {};            ///< who is where, for errors that name no rank; empty: not known
};

/// CPU reductions move bytes and add in rank order (Gloo's own reductions depend on its algorithm); CUDA ones are the backend's.
class C10dTransport final : public Transport {
 public:
  C10dTransport(c10::intrusive_ptr<c10d::ProcessGroup> group, int rank, int size, C10dOptions options);
  ~C10dTransport() override;

  void all_gather(const Call& call, at::Tensor& output, const at::Tensor& input) override;
  void reduce_scatter(const Call& call, at::Tensor& output, const at::Tensor& input, ReduceOp op) override;
  void all_reduce(const Call& call, at::Tensor& tensor, ReduceOp op) override;
  void broadcast(const Call& call, at::Tensor& tensor, int root) override;
  void all_to_all(const Call& call, at::Tensor& output, const at::Tensor& input) override;
  /// Where every rank is a host of its own: an all_to_all.
  void reduce_scatter_by_host(const Call& call, at::Tensor& output, const at::Tensor& input) override { all_to_all(call, output, input); }
  void send(const Call& call, const at::Tensor& tensor, int destination, int tag) override;
  void recv(const Call& call, at::Tensor& tensor, int source, int tag) override;

  using Pending = std::shared_ptr<const c10::intrusive_ptr<c10d::Work>>;
  /// An uneven all_to_all of bytes, CPU: `send[r]` of `input` go to rank r and `receive[r]` of `output` come from it, one after another in
  /// rank order. Several may be under way; ranks start them in the same order. The tensors are free again after finish().
  Pending start_exchange(const Call& call, at::Tensor& output, const at::Tensor& input, const std::vector<std::int64_t>& receive,
                         const std::vector<std::int64_t>& send);
  void finish(const Call& call, const Pending& work);

 private:
  using Start = std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend&)>;
  /// Start an operation on the backend of `tensor`'s device and wait for it.
  void run(const Call& call, const at::Tensor& tensor, const Start& start);
  c10::intrusive_ptr<c10d::Backend> backend_for(const Call& call, const at::Tensor& tensor) const;
  void count_sent(const at::Tensor& tensor, std::int64_t bytes) const;
  void wait_or_abandon(const Call& call, c10d::Work& work) const;
  void wait_for_report(const Call& call, c10d::Work& work) const;
  void run_pair(const Call& call, const at::Tensor& tensor, const Start& start);
  std::string explain(const Call& call) const { return options_.explain ? options_.explain(call) : std::string(); }
  template <class Function>
  void translate(const Call& call, Function&& function) const;
  void check_mismatch(const Call& call) const;
  void check_peers(const Call& call, bool also_in_order = false) const;
  using TimePoint = std::chrono::steady_clock::time_point;
  /// What is asked about every 50 ms of a wait; throws to leave it. `ended_since`: as below.
  void look_around(const Call& call, double waited_s, TimePoint& ended_since) const;
  /// The same when a peer has been known to have ended for `grace`; `since`: when it was first known.
  void check_peers_after(const Call& call, std::chrono::milliseconds grace, TimePoint& since) const;
  [[noreturn]] void raise(const Call& call, std::string_view reason) const;
  void gather_in_pieces(const Call& call, at::Tensor& output, const at::Tensor& input);
  void reduce_slices(const Call& call, const at::Tensor& output, const at::Tensor& input, ReduceOp op);

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const int rank_, size_;
  const C10dOptions options_;
};

}  // namespace unshard::comm
