#pragma once
// HostGroup's one implementation, with what the shared-memory transport needs beyond the public promise.
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/control_block.h"
#include "comm/fd_channel.h"
#include "comm/fork_guard.h"
#include "comm/peer_watch.h"
#include "comm/segment.h"
#include "unshard/comm/host_group.h"

namespace unshard::comm {

class HostGroupImpl;

/// Where a wait happens, for messages: "[comm.barrier 'step: publish']".
struct Place {
  std::string_view op, detail;
  std::string text() const;
};

/// What ranks are called in messages, where this group is part of a larger one that spans hosts.
struct Names {
  std::vector<int> ranks;  ///< by rank of this group: its number in the larger one; empty: the same
  int world_size = 0;      ///< of the larger one
};

/// What ranks that are threads of one process share instead of sockets.
struct InProcessShare {
  std::mutex mutex;
  std::shared_ptr<MemfdSegment> segment;              ///< being handed out
  std::vector<std::shared_ptr<HostGroupImpl>> group;  ///< being handed out
};

/// How a wait behaves beyond HostGroupOptions.
struct WaitRules {
  /// Whether rank r still owes what is waited for. A peer that owes and ended is an error at once; null: it can't be told, so the death
  /// of any peer is an error at once, and that one left in good order after a grace.
  std::function<bool(int)> owes;
  /// Shorter limit than options.timeout; when it passes the wait returns false instead of throwing.
  std::optional<std::chrono::duration<double>> give_up;
  /// A peer's work is waited for that has a time-out of its own: time counts from the last change of this number, and is a little longer.
  std::function<std::uint64_t()> progress = {};
};

class HostGroupImpl final : public HostGroup {
 public:
  struct Parts {
    int rank = 0, size = 1;
    HostGroupOptions options;
    std::shared_ptr<MemfdSegment> control;
    PeerWatch watch;
    FdChannel channel;                      ///< processes
    std::shared_ptr<InProcessShare> share;  ///< threads; null: processes
    Names names;
    std::shared_ptr<MemfdSegment> family = {};  ///< of a subset: the control block of the group that it was first taken from
    std::vector<int> family_ranks = {};         ///< by rank: its number there
  };
  explicit HostGroupImpl(Parts parts);
  ~HostGroupImpl() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::shared_ptr<SharedSegment> create_segment(std::string_view name, std::size_t bytes, std::size_t limit_bytes) override;
  void barrier(std::string_view where) override;
  void all_gather_small(const void* mine, std::size_t bytes, void* all, std::string_view where) override;
  void wait_until(const std::function<bool()>& ready, std::string_view where) override;
  void wait_for_work(const std::function<bool()>& ready, const std::function<std::uint64_t()>& progress, std::string_view where) override;
  void notify() override;
  void set_phase(Phase phase, std::int64_t step, std::string_view detail) override;
  Phase phase_of(int rank) const override;
  std::string describe_ranks() const override;
  void fail(std::string_view reason) override;

  /// Collective: create_segment with a choice of backing.
  std::shared_ptr<SharedSegment> create(std::string_view name, std::size_t bytes, std::size_t limit_bytes, Backing backing);
  /// As wait_until. Returns false only when rules.give_up passed.
  bool wait(const std::function<bool()>& ready, const Place& place, const WaitRules& rules = {});
  /// Collective over this group: a group of its own for `ranks`, null on the others.
  std::shared_ptr<HostGroupImpl> subset(const std::vector<int>& ranks, const Names& names = {});
  /// Collective. Any length; about 2 us per 4 KiB of the longest.
  std::vector<std::string> all_gather_strings(const std::string& mine, std::string_view where);
  /// Collective by intent: see Communicator::check_all_in.
  void check_all_in(std::string_view call, std::chrono::duration<double> limit);
  /// "rank 1 failed: ..." or "rank 1 is gone (...)" about the first peer of which that is known; else empty.
  std::string ended_peer() const;

  /// Called about every 50 ms of any wait, on the waiting thread; throws to leave it. Set before the group is used.
  void set_wait_hook(std::function<void(const Place& place, double waited_s)> hook) { wait_hook_ = std::move(hook); }

  /// Called when a wait for which the wait hook was called, or may have been, has ended well.
  void set_wait_end_hook(std::function<void()> hook) { wait_end_hook_ = std::move(hook); }
  /// Makes of describe_ranks() what the messages of waits say, for a group that is part of a communicator. Set before the group is used.
  void set_describe_all(std::function<std::string(std::string ranks)> describe) { describe_all_ = std::move(describe); }

  /// Called with the text of an error that leaves a wait. Set before the group is used.
  void set_failure_hook(std::function<void(std::string_view)> hook) { failure_hook_ = std::move(hook); }

  /// The number of a rank in messages, and "rank 2 of 4" for this one.
  int name(int rank) const { return names_.ranks.empty() ? rank : names_.ranks[static_cast<std::size_t>(rank)]; }
  std::string own_name() const;

  /// Why this rank is about to leave without having failed; others that wait for it are told. Empty: nothing is known.
  void set_departure(std::string_view why) {
    if (!ended_.load()) mine().failure.set(why);
  }
  /// A wait of this rank that its peers can't see here: "waiting in ..."; empty: it has ended.
  void set_elsewhere(std::string_view text) { mine().elsewhere.set(text); }
  std::string describe(int rank) const;
  /// Whether it waits, here or elsewhere.
  bool is_waiting(int rank) const;

  /// What this rank publishes about itself.
  struct Status {
    Phase phase = Phase::starting;
    std::int64_t step = 0;
    std::string detail, waiting;  ///< waiting: empty unless it sleeps in a wait
    double phase_for_s = 0, waiting_for_s = 0;
  };
  Status status() const;

  /// "rank 1 (pid 1234) ..., last seen in backward of step 3 at 'blocks.1.up.weight'; this is rank 0 of 2"
  std::string describe_end(int rank, std::string_view what) const;

 private:
  RankBlock& block(int rank) const { return control_->ranks[rank]; }
  RankBlock& mine() const { return control_->ranks[rank_]; }
  /// A rank's phase, step and place: a subset in which it never said any shows what it says in the group the subset is of.
  const RankBlock& shown(int rank) const;
  /// Where a peer's failure stands: here, or in the group this subset is of; null: it hasn't failed.
  const RankBlock* failed_block(int rank) const;
  const RankBlock* family_block(int rank) const;
  void give_up(const std::string& why);
  void check_not_ended(const Place& place) const;
  std::string describe_failure(int rank, const std::string& told) const;
  std::string describe_all() const;  ///< describe_ranks(), with what set_describe_all() adds
  void leave(Phase phase);
  void check_member(const char* what) const { fork_guard_.check(what); }

  struct WaitClock {
    explicit WaitClock(std::int64_t now_ns) : started(now_ns), looked(now_ns), interrupted(now_ns) {}
    std::int64_t started, looked, interrupted;
    std::int64_t moved = started;  ///< when what is waited for last got on
    std::uint64_t progress = 0;
    std::int64_t ended_seen = 0;     ///< when an ended peer that owes nothing was first seen
    std::int64_t mismatch_seen = 0;  ///< when a peer was first seen in another call
    bool reported = false;
  };
  bool wait_asleep(const std::function<bool()>& ready, const Place& place, const WaitRules& rules);
  void look_for_ended_peers(const std::function<bool()>& ready, const Place& place, const WaitRules& rules, WaitClock& clock) const;
  void look_for_other_calls(const std::function<bool()>& ready, const Place& place, const WaitRules& rules, WaitClock& clock);
  void report_stall(const Place& place, WaitClock& clock) const;
  std::uint64_t announced_by(int rank) const;
  void publish_waiting(const Place* place);
  std::string describe_stopped(int rank) const;  ///< empty: its process isn't stopped
  std::string last_seen(int rank) const;
  std::string absence_text(std::string_view call, std::uint64_t sequence) const;

  const int rank_, size_;
  const HostGroupOptions options_;
  const std::chrono::nanoseconds spin_;
  const ForkGuard fork_guard_;
  const std::shared_ptr<MemfdSegment> control_segment_;
  ControlBlock* const control_;
  const PeerWatch watch_;
  const FdChannel channel_;
  const std::shared_ptr<InProcessShare> share_;
  const Names names_;
  const std::shared_ptr<MemfdSegment> family_;
  const std::vector<int> family_ranks_;

  std::uint64_t small_gathers_ = 0, announcements_ = 0;  ///< collective calls are made by one thread at a time
  std::atomic<bool> ended_{false};                       ///< failed or gone: the phase is final
  std::mutex waiting_mutex_;                             ///< texts of several sleeping threads
  std::function<void(const Place&, double)> wait_hook_;
  std::function<void()> wait_end_hook_;
  std::function<std::string(std::string)> describe_all_;
  std::function<void(std::string_view)> failure_hook_;
};

/// The group that a subset is of, and its members' numbers there.
struct Family {
  std::shared_ptr<MemfdSegment> control;
  std::vector<int> ranks;
};

/// HostGroup's factories, with names. Collective.
std::vector<std::shared_ptr<HostGroupImpl>> threads_group(int size, const HostGroupOptions& options, const Names& names = {},
                                                          const Family& family = {});
std::shared_ptr<HostGroupImpl> processes_group(int rank, int size, const HostGroup::Exchange& exchange, const HostGroupOptions& options,
                                               const Names& names = {}, const Family& family = {});

}  // namespace unshard::comm
