#pragma once
// Collectives between ranks: shared memory when all of them are on one host, c10d (Gloo, NCCL) otherwise.
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "unshard/comm/flight_recorder.h"
#include "unshard/comm/host_group.h"
#include "unshard/core/timeline.h"

namespace at {
class Tensor;
}
namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace unshard {

class RunRecord;

enum class ReduceOp { sum, max, min };

/// Bytes that left this rank (or, in shared memory, that this rank wrote for others to read) and calls, per operation.
struct OpCount {
  std::int64_t calls = 0, bytes = 0;
};

/// The entry of Communicator::counts() that has what this rank sent to ranks of other hosts: the sum over a host's ranks is what leaves
/// that host. Its bytes are part of the operations' own entries. Kept for CPU tensors, where memory is shared inside the hosts.
inline constexpr std::string_view kHostLink = "host_link";

struct CommOptions {
  bool share_memory = true;  ///< false: as if every rank were on a host of its own
  /// What names this rank's host; ranks that name the same one share memory. Empty: found out (machine, network and process namespaces).
  /// Overridden for tests and for machines that are cut in two. Python and the launchers set it from UNSHARD_HOST.
  std::string host_name;
  std::chrono::duration<double> timeout{1800};
  std::chrono::duration<double> collective_check{60};
  std::function<void()> interrupt_check;  ///< see HostGroupOptions
  /// Where this communicator and its sub-groups tell what they do, and that they fail; may be null. See run_record.h.
  std::shared_ptr<RunRecord> record;
};

/// A group of ranks. Collectives: all ranks of the group call them in the same order with equal sizes and dtypes; tensors are contiguous.
/// Reductions add in rank order: the same bits on every rank, every run, whatever moves them. Where several hosts take part and one of them
/// has several ranks, each host's ranks are added first, then the hosts' sums, in order; every byte then crosses between two hosts once,
/// not once a rank, and 16-bit sums are rounded once a host. Errors: std::invalid_argument before any communication; CommError (peer dead,
/// stalled, disagreeing) naming rank, collective, detail.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  /// [n] on each rank -> [world_size * n]. Sends (N-1)/N of the output's bytes.
  virtual void all_gather(at::Tensor& output, const at::Tensor& input, std::string_view detail = {}) = 0;
  /// [world_size * n] on each rank -> [n]: this rank's slice of the reduction. 16-bit inputs are added in fp32.
  virtual void reduce_scatter(at::Tensor& output, const at::Tensor& input, ReduceOp op = ReduceOp::sum, std::string_view detail = {}) = 0;
  /// reduce_scatter (sum) that keeps the hosts' parts apart: [world_size * n] on each rank -> [hosts * n], for this rank's slice the sum
  /// over each host's ranks, hosts in order. With one rank a host: every rank's slice as it is.
  virtual void reduce_scatter_by_host(at::Tensor& output, const at::Tensor& input, std::string_view detail = {}) = 0;
  virtual void all_reduce(at::Tensor& tensor, ReduceOp op = ReduceOp::sum, std::string_view detail = {}) = 0;
  virtual void broadcast(at::Tensor& tensor, int root, std::string_view detail = {}) = 0;
  /// Equal splits: slice r of `input` goes to rank r.
  virtual void all_to_all(at::Tensor& output, const at::Tensor& input, std::string_view detail = {}) = 0;
  /// May wait until the destination receives it (always for long messages); messages of one pair and tag keep their order.
  virtual void send(const at::Tensor& tensor, int destination, int tag = 0) = 0;
  virtual void recv(at::Tensor& tensor, int source, int tag = 0) = 0;
  virtual void barrier(std::string_view where = {}) = 0;
  /// Small strings of every rank, in rank order (names, hashes, errors); at most about 1 MiB each.
  virtual std::vector<std::string> all_gather_strings(const std::string& mine) = 0;

  /// Announce a call that is collective by nature ("save(tag=a)") and wait for all ranks to announce the same.
  /// \throws CommError "rank 0 is in save(tag=a), rank 1 is in step()" within options.collective_check (default 60 s).
  virtual void check_all_in(std::string_view call) = 0;

  /// This rank can't go on, for a reason outside the collectives: the others' waits end with it, as after an error in a collective of
  /// theirs, and this group can't be used any more.
  virtual void fail(std::string_view reason) = 0;
  /// What says "rank 2 is gone (...)" or "rank 1 failed: ..." once that is known of a rank of this group, without waiting; else nothing.
  /// For waits outside the collectives; it may outlive the communicator.
  virtual std::function<std::string()> watch_for_ends() const = 0;
  /// What says how a rank of another host stands: where it is, when it was last heard of, in what it waits; nothing of this host's ranks.
  /// May outlive the communicator.
  virtual std::function<std::string(int rank)> watch_ranks() const = 0;

  /// Collective over *all* ranks of this group (also those not in `ranks`, which get nullptr).
  virtual std::shared_ptr<Communicator> subgroup(const std::vector<int>& ranks, std::string_view name) = 0;

  /// Non-null when all ranks of this group share this host's memory (and sharing is on).
  virtual HostGroup* host() const = 0;
  /// The ranks of this group on this rank's host, when they share memory (and sharing is on): host() where all do. Its ranks are numbered
  /// 0.. in the order of this group's. Null with sharing off, or without memory to share; never null when several hosts take part.
  virtual HostGroup* local_host() const { return host(); }
  /// The host of every rank, by rank: hosts are numbered in the order of their first rank. With sharing off every rank is a host of its
  /// own.
  virtual std::vector<int> hosts() const = 0;
  /// A c10d group of its own for `name` (one-sided service), or nullptr without c10d. Collective.
  virtual c10::intrusive_ptr<c10d::ProcessGroup> new_process_group(std::string_view name) = 0;

  virtual const std::map<std::string, OpCount>& counts() const = 0;     ///< since creation or reset_counts()
  virtual void add_count(std::string_view op, std::int64_t bytes) = 0;  ///< for movers that bypass the collectives (buckets, pulls)
  virtual void reset_counts() = 0;
  virtual FlightRecorder& recorder() = 0;
  /// What this rank does now: for its peers' error messages and waits where memory is shared, and for records. Costs tens of ns.
  virtual void set_phase(Phase phase, std::string_view detail) = 0;
  /// What this rank does when, off until an engine opens it. Sub-groups record into their parent's.
  virtual Timeline& timeline() = 0;
  virtual const CommOptions& options() const = 0;
  /// The training step, for messages and records; one for a group and its sub-groups.
  virtual void set_step(std::int64_t step) = 0;
  virtual std::int64_t step() const = 0;
};

/// From RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT (also the names mpirun and srun set); no variables: a world of one.
/// `backend`: "" or "gloo" (used when ranks don't share memory). NCCL groups are made by torch.distributed and passed to make_communicator.
/// Collective.
/// \throws std::invalid_argument naming a missing or malformed variable. \throws CommError address or port can't be used.
std::shared_ptr<Communicator> init_process_group(const CommOptions& options = {}, const std::string& backend = {});

/// Over a group that exists (Python's torch.distributed). `store`: any store all its ranks reach. Collective. A group with no backend but
/// Gloo on the CPU says who takes part and is let go; the messages get connections of their own.
std::shared_ptr<Communicator> make_communicator(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::intrusive_ptr<c10d::Store> store,
                                                const CommOptions& options = {});

/// Ranks as threads of this process, for tests: element r is rank r's. With share_memory off they talk through Gloo over loopback.
std::vector<std::shared_ptr<Communicator>> in_process_communicators(int world_size, const CommOptions& options = {});
/// The same on several hosts of so many ranks each (rank order): memory is shared inside a host, Gloo over loopback between them.
std::vector<std::shared_ptr<Communicator>> in_process_hosts(const std::vector<int>& ranks_per_host, const CommOptions& options = {});

/// A world of one that needs no c10d.
std::shared_ptr<Communicator> single_process_communicator(const CommOptions& options = {});

}  // namespace unshard
