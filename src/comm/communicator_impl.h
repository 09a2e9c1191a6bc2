#pragma once
// The one Communicator: checks arguments, counts and records, and hands the bytes to a transport.
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/c10d_transport.h"
#include "comm/hierarchical_transport.h"
#include "comm/host_group_internal.h"
#include "comm/host_map.h"
#include "comm/peer_health.h"
#include "comm/stall_watch.h"
#include "comm/store_exchange.h"
#include "comm/transport.h"
#include "unshard/comm/communicator.h"
#include "unshard/comm/run_record.h"

namespace unshard::comm {

class CommunicatorImpl final : public Communicator {
 public:
  struct Parts {
    int rank = 0, size = 1;
    CommOptions options;
    std::shared_ptr<HostGroupImpl> local;             ///< this rank's host, where memory is shared; null: it isn't
    HostMap map;                                      ///< size 1 may leave it empty
    c10::intrusive_ptr<c10d::ProcessGroup> group;     ///< null: no c10d transport (then all ranks are on one host, or size is 1)
    c10::intrusive_ptr<c10d::Store> store;            ///< null: no new_process_group
    std::shared_ptr<PeerHealth> health;               ///< null: threads, or one host
    std::vector<int> numbers;                         ///< by rank: what `health` calls it; empty: the same
    bool loopback = false;                            ///< new groups talk over loopback (threads of a process)
    std::string name;                                 ///< of a sub-group, in records
    std::vector<int> run_ranks;                       ///< of a sub-group: its members, as ranks of the run
    std::shared_ptr<Timeline> timeline;               ///< null: one of its own
    std::shared_ptr<std::atomic<std::int64_t>> step;  ///< of the run; null: one of its own
    std::shared_ptr<std::atomic<std::int64_t>> last_stall_report;  ///< see StallWatch; null: one of its own
  };
  /// Collective when local is set (it makes the staging memory).
  explicit CommunicatorImpl(Parts parts);
  ~CommunicatorImpl() override;

  int rank() const override { return rank_; }
  int world_size() const override { return size_; }
  void all_gather(at::Tensor& output, const at::Tensor& input, std::string_view detail) override;
  void reduce_scatter(at::Tensor& output, const at::Tensor& input, ReduceOp op, std::string_view detail) override;
  void reduce_scatter_by_host(at::Tensor& output, const at::Tensor& input, std::string_view detail) override;
  void all_reduce(at::Tensor& tensor, ReduceOp op, std::string_view detail) override;
  void broadcast(at::Tensor& tensor, int root, std::string_view detail) override;
  void all_to_all(at::Tensor& output, const at::Tensor& input, std::string_view detail) override;
  void send(const at::Tensor& tensor, int destination, int tag) override;
  void recv(at::Tensor& tensor, int source, int tag) override;
  void barrier(std::string_view where) override;
  std::vector<std::string> all_gather_strings(const std::string& mine) override;
  void check_all_in(std::string_view call) override;
  void fail(std::string_view reason) override;
  void set_departure(std::string_view why);
  std::function<std::string()> watch_for_ends() const override;
  std::function<std::string(int)> watch_ranks() const override;
  std::shared_ptr<Communicator> subgroup(const std::vector<int>& ranks, std::string_view name) override;
  HostGroup* host() const override { return host_.get(); }
  HostGroup* local_host() const override { return local_.get(); }
  std::vector<int> hosts() const override { return map_.host; }
  c10::intrusive_ptr<c10d::ProcessGroup> new_process_group(std::string_view name) override;
  const std::map<std::string, OpCount>& counts() const override { return counts_; }
  void add_count(std::string_view op, std::int64_t bytes) override;
  void reset_counts() override;
  FlightRecorder& recorder() override { return recorder_; }
  void set_phase(Phase phase, std::string_view detail) override;
  Timeline& timeline() override { return *timeline_; }
  const CommOptions& options() const override { return options_; }
  void set_step(std::int64_t step) override { step_->store(step, std::memory_order_relaxed); }
  std::int64_t step() const override { return step_->load(std::memory_order_relaxed); }

 private:
  Transport& transport_for(const Call& call, const at::Tensor& tensor) const;
  /// Record, run, count. After an error the group is out of step: every later call throws at once, naming the first error, and so do the
  /// waits of this host's peers.
  /// For RunRecord, on any thread.
  GroupRecord describe();
  /// A wait inside a collective of this thread goes on, outside shared memory or between hosts. \throws CommError; see StallWatch.
  void on_waiting(double waited_s);
  /// The same in a send or recv.
  void on_waiting_for(int peer, std::string_view op, std::string_view detail, double waited_s);
  bool is_performing() const;
  Named performing_call() const;  ///< of the thread that is in a collective
  Doing doing() const;
  /// Who is where, as far as it is known, for errors that name nobody. May ask the store, for 1.5 s.
  std::string explain();
  std::string explain_pair(const Call& call);
  Named pair_call(std::string_view op, std::string_view detail) const;
  /// A wait of this rank goes on for long, in `place`: its other groups' members are told. Until end_wait().
  void tell_wait(const std::string& place);
  void end_wait();
  void hear_wait(std::string_view group, std::string_view place);
  void set_hooks();
  /// A rank of this group as far as is known, for those that wait: see StallWatch::Describe.
  std::string describe_rank(int rank, const std::string& said, bool& waits) const;
  /// The ranks of other hosts, by describe_rank().
  std::string describe_remote() const;
  /// What to add where ranks wait for each other in different groups.
  std::string with_advice(std::string ranks) const;
  template <class Function>
  void perform(std::string_view op, std::string_view detail, std::int64_t bytes, Function&& function);
  std::vector<std::string> gather_strings(const Call& call, const std::string& mine);
  void check_usable(const Call& call) const;
  void set_broken(std::string_view reason);
  void check_peer(const char* op, int peer) const;
  /// "rank 2 is gone (...)", or empty.
  std::string ended_peer(bool also_in_order) const;
  bool spans_hosts() const { return local_ && map_.hosts() > 1; }
  std::int64_t share(std::int64_t bytes) const { return bytes / size_ * (size_ - 1); }
  c10::intrusive_ptr<c10d::Store> substore(std::string_view kind, std::string_view name);
  /// Connections for collectives of this group (or of a part of it, of which this rank is number `rank`), inside perform().
  c10::intrusive_ptr<c10d::ProcessGroup> connect_group(const Call& call, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size);

  const int rank_, size_;
  const CommOptions options_;
  const HostMap map_;
  const std::shared_ptr<HostGroupImpl> local_;
  const std::shared_ptr<HostGroupImpl> host_;  ///< local_ where all ranks are on one host
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::shared_ptr<PeerHealth> health_;
  const std::vector<int> numbers_;
  const bool loopback_;
  std::unique_ptr<Transport> shared_memory_;
  std::unique_ptr<C10dTransport> c10d_;
  std::unique_ptr<HierarchicalTransport> hierarchical_;  ///< several hosts, several ranks on one of them
  std::unique_ptr<StoreExchange> calls_, strings_;       ///< over the store, when memory isn't shared; strings_: without a CPU backend

  FlightRecorder recorder_;
  std::unique_ptr<StallWatch> stall_;          ///< over the store, when not all ranks share memory
  std::atomic<std::thread::id> performing_{};  ///< the thread that is in a collective
  struct {
    std::string_view op, detail;
    std::int64_t bytes = 0;
  } performing_call_;           ///< that thread's
  Named former_call_;           ///< and the one before
  std::vector<int> run_ranks_;  ///< this group's members, as ranks of the run
  std::string name_;
  std::uint64_t record_id_ = 0;
  std::atomic<bool> told_wait_{false};
  const std::shared_ptr<Timeline> timeline_;
  std::map<std::string, OpCount> counts_;
  std::mutex counts_mutex_;
  const std::shared_ptr<std::atomic<std::int64_t>> step_, last_stall_report_;
  std::uint64_t children_ = 0;  ///< sub-groups and process groups made; keeps their store keys apart
  mutable std::mutex broken_mutex_;
  std::atomic<bool> is_broken_{false};
  std::string broken_;  ///< the first error
};

}  // namespace unshard::comm
