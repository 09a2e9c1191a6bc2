#pragma once
// Collectives of ranks on several hosts that share memory inside each: every byte crosses between two hosts once, however many ranks they
// have, and the ranks of a host share the work of it. CPU tensors.
//
// Sums are (ranks of host 0 in rank order) + (ranks of host 1) + ..., and a host's part travels in the tensor's dtype: 16-bit sums are
// rounded once a host. With one rank a host that is the sum in rank order, rounded once.
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "comm/c10d_transport.h"
#include "comm/host_map.h"
#include "comm/host_slots.h"
#include "comm/route.h"
#include "comm/shm_mailbox.h"
#include "comm/transport.h"

namespace unshard::comm {

class HierarchicalTransport final : public Transport {
 public:
  /// Collective over all ranks. `local`: those of this rank's host. `link`: all ranks; outlives this.
  HierarchicalTransport(std::shared_ptr<HostGroupImpl> local, C10dTransport& link, HostMap map, int rank);

  void all_gather(const Call& call, at::Tensor& output, const at::Tensor& input) override;
  void reduce_scatter(const Call& call, at::Tensor& output, const at::Tensor& input, ReduceOp op) override;
  void all_reduce(const Call& call, at::Tensor& tensor, ReduceOp op) override;
  void broadcast(const Call& call, at::Tensor& tensor, int root) override;
  void all_to_all(const Call& call, at::Tensor& output, const at::Tensor& input) override;
  void reduce_scatter_by_host(const Call& call, at::Tensor& output, const at::Tensor& input) override;
  /// Shared memory inside a host, c10d between them.
  void send(const Call& call, const at::Tensor& tensor, int destination, int tag) override;
  void recv(const Call& call, at::Tensor& tensor, int source, int tag) override;

  void barrier(const Call& call);
  std::vector<std::string> all_gather_strings(const Call& call, const std::string& mine);

 private:
  /// One piece of a collective on its way between hosts.
  struct Flight {
    std::byte* slot = nullptr;
    at::Tensor sent, received;  ///< bytes, in the order of the route
    at::Tensor own;             ///< reductions: this host's part of what this rank adds up
    C10dTransport::Pending work;
  };
  using Length = std::function<std::size_t(int piece)>;

  /// A flight over the next slot, with so many bytes of its own.
  Flight take_slot(std::size_t own_bytes = 0);
  /// Make flight.sent for `route`, filled by `fill(leg, to)`, and start its exchange. Makes flight.received unless it is there.
  template <class Fill>
  void launch(const Call& call, Flight& flight, const Route& route, const Length& length, Fill&& fill);
  void start_exchange(const Call& call, Flight& flight, const Route& route, const Length& length);
  /// Wait for it, and visit what came.
  template <class Visit>
  void land(const Call& call, Flight& flight, const Route& route, const Length& length, Visit&& visit);

  /// Reduction of every rank's slice: take(offset, bytes, partials) gets this rank's, as one array a host.
  template <class Take>
  void scatter(const Call& call, const at::Tensor& input, ReduceOp op, Take&& take);
  void all_reduce_spread(const Call& call, at::Tensor& tensor, ReduceOp op);
  void all_reduce_sliced(const Call& call, at::Tensor& tensor, ReduceOp op);
  /// The first ranks of the hosts exchange strings; on others empty ones come back. By host.
  std::vector<std::string> exchange_leaders(const Call& call, const std::string& mine);
  bool is_here(int rank) const { return map_.host[static_cast<std::size_t>(rank)] == host_; }

  const std::shared_ptr<HostGroupImpl> local_;
  C10dTransport& link_;
  const HostMap map_;
  const int rank_, world_, host_;
  HostSlots slots_;
  ShmMailbox mailbox_;
  const Route gather_, scatter_, spread_, all_to_all_, leaders_;
  std::vector<int> gather_places_;  ///< by rank: where in a slot its piece lies in an all_gather
  std::vector<int> spread_mine_;    ///< pieces that this rank handles
};

}  // namespace unshard::comm
