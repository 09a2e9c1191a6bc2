#pragma once
// Everything a store holds; its work is split by subject: residency.cc, prefetch.cc, adopt.cc, settle.cc, publish.cc, edit.cc,
// release.cc, turns.cc; host_residency.cc and fetch_ahead.cc for one copy of the parameters a host.
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "unshard/comm/communicator.h"
#include "unshard/core/error.h"
#include "unshard/zero/parameter_store.h"
#include "zero/derived.h"
#include "zero/entry.h"
#include "zero/host_copy.h"
#include "zero/mode.h"
#include "zero/plan_follower.h"
#include "zero/shard_service.h"
#include "zero/trace.h"
#include "zero/write_counters.h"

namespace unshard::zero {

/// What touches outside the agreed plan cost in this step.
struct Divergence {
  std::int64_t touches = 0;
  int first = -1;                                 ///< parameter
  std::int64_t step = 0, bytes = 0, wait_ns = 0;  ///< when the step began: its number, fetched for touches and waited so far
  bool warned = false;
};

/// The touches of one mode, and what is made of them.
struct ModeState {
  explicit ModeState(const TraceOptions& options) : trace(options) {}

  TouchTrace trace;
  std::unique_ptr<PlanFollower> follower;  ///< hosted
  bool plan_is_old = false;                ///< the trace, or an option, has changed since it was made
  /// The trace that the next plan is made of as it was at the last agreed point, and whether all ranks had the same.
  struct {
    std::uint64_t hash = 0;
    std::size_t touches = 0;
    bool equal = false;
  } settled;
};

static_assert(kModes == HostCopy::kPlans);

struct StoreState {
  StoreState(std::shared_ptr<Communicator> communicator, const StoreOptions& store_options);
  ~StoreState();
  StoreState(const StoreState&) = delete;
  StoreState& operator=(const StoreState&) = delete;

  // adopt.cc: parameters come under the store, and come back to it when their storage was replaced.
  int add(const at::Tensor& parameter, const std::string& name, bool partitioned);
  void rename(int id, const std::string& name);
  void check_storages();

  // residency.cc: the private copies. [Note: one lock, never held while waiting] `mutex` guards every entry's residence and the accounts. A
  // thread that brings bytes in marks the entry `filling`, lets the lock go, and takes it again to install the copy; others wait on
  // `filled`.
  /// \param in_lockstep  false: a write that settles later even inside set_lockstep_writes(true).
  Pinned pin(Entry& entry, Access access, bool in_lockstep = true);
  void unpin(Entry& entry, bool abandon) noexcept;
  void finish_lockstep_write(Entry& entry);
  /// Pins of a scope: several parameters are fetched together. Pins all or none.
  void pin_all(const std::vector<int>& ids);
  Pinned fetch_and_pin(Entry& entry, Access access, bool in_lockstep);  ///< what pin() does where it has to wait
  void fetch_and_pin_all(const std::vector<int>& ids);
  void release_copy(Entry& entry);  ///< lock held; entry gathered or written, not pinned
  void release_gathered();
  bool rests_whole(const Entry& entry) const { return entry.home != nullptr; }
  void check_process(const Entry& entry) const;  ///< \throws std::runtime_error in a forked child
  /// The whole value into `to` [whole_bytes]: memory, or the own slice and a fetch of the others. No lock held.
  void load_whole(const std::vector<Entry*>& loaded, const std::vector<std::byte*>& to);
  /// The service's fetch; its errors name the parameters and where this rank was.
  void fetch(const std::vector<ShardService::Request>& requests, const std::vector<Entry*>& wanted);
  /// Lock held; filling -> at_rest: bringing them in failed, and those who wait for it have the same error.
  void fail_fills(const std::vector<Entry*>& filling, const CommError& error);
  at::DataPtr allocate(const Entry& entry) const;
  /// Lock held; filling -> `residence`, or at_rest: the value that was `loaded` has moved on meanwhile. \return whether it was installed.
  bool install_copy(Entry& entry, at::DataPtr copy, Residence residence, bool loaded = true);
  void begin_fill(Entry& entry);  ///< lock held; at_rest -> filling, counted as live
  void fail_fill(Entry& entry);   ///< lock held; filling -> at_rest
  /// The value has changed on all ranks: no copy of it is the value any more. Behind the fence that closes the change, on every rank.
  void move_on(const std::vector<int>& ids);
  void follow(Entry& entry);  ///< lock held
  void mark_fenced();         ///< all ranks have passed an agreed point: values at rest are complete

  // host_residency.cc: several hosts, one copy of the parameters on each (see host_copy.h). No lock held unless it says so.
  /// This rank becomes a user of each (drop() undoes it); blocks while their pieces are brought in. All or none.
  void bring_in(const std::vector<Entry*>& wanted);
  void drop_holds(const std::vector<Entry*>& held) noexcept;
  void pull(const std::vector<Entry*>& claimed, bool held);  ///< claimed, with room taken -> present; \throws CommError
  bool readable_at_home(Entry& entry);                       ///< lock held; the hold it needs is taken
  /// Lock held. Takes room for `numel` below `limit`. For it unused parameters leave that no rank of this host needs within `beyond`
  /// elements; with `spared`, none that a slower rank has yet to use and this one has used (*spared says that there was one).
  bool make_host_room(std::int64_t numel, std::int64_t bytes, std::int64_t limit, std::int64_t beyond, bool* spared);
  bool let_memory_go(Entry& entry);                ///< lock held; false: somebody uses it, or it isn't here
  void shrink_to_budget();                         ///< lock held
  bool spares_slower();                            ///< lock held; what a slower rank of the host is about to use stays, for now
  void follow_plan(Entry& entry);                  ///< lock held
  void refresh_held(const std::vector<int>& ids);  ///< those that something pins here get the new value, after a fence
  void set_up_home(Entry& entry);                  ///< its memory, by the first rank of the host to add it

  // fetch_ahead.cc
  void wake_fetch_ahead();  ///< lock held

  // turns.cc: see [Note: modes].
  void begin_step();
  void begin_forward();
  void end_forward();
  void note_mode(int id);  ///< lock held; `id` is touched now
  void close_pass();       ///< lock held; what the current mode has recorded is a whole pass
  ModeState& of(Mode which) { return modes[static_cast<std::size_t>(which)]; }
  ModeState& now() { return of(mode); }
  TouchTrace& trace() { return now().trace; }
  PlanFollower& follower() { return *now().follower; }

  // prefetch.cc
  void follow_trace(Entry& entry);  ///< lock held
  void drain_prefetch();            ///< until nothing is being fetched ahead
  void stop_prefetch();

  // settle.cc, publish.cc, edit.cc, release.cc
  std::vector<int> settle();
  void publish(const std::vector<std::uint8_t>& updated);
  void begin_edit(const std::vector<int>& ids);
  void end_edit(const std::vector<int>& ids, int modifier);
  void enter_inference();
  void leave_inference();
  void release_all(bool communicate);

  at::Tensor own_slice(int id);
  at::Tensor whole_if_local(int id);
  StoreBytes bytes() const;
  ResidencyStats stats() const;

  Entry& at(int id, const char* where) const;
  std::string unreadable_message(const Entry& entry) const;

  std::shared_ptr<Communicator> comm;
  StoreOptions options;
  ParameterStore* owner = nullptr;
  const int rank, world;
  const bool shared;          ///< partitioned parameters rest in memory that all ranks map
  const bool hosted;          ///< several hosts: they rest in memory that a host's ranks map, where other hosts' pieces are brought in
  const unsigned generation;  ///< of the process that made the store
  std::vector<std::unique_ptr<Entry>> entries;
  bool released = false;

  std::shared_ptr<SharedSegment> segment;
  std::size_t segment_used = 0;
  std::unique_ptr<WriteCounters> counters;     ///< shared or hosted
  std::unique_ptr<ShardService> service;       ///< private or hosted
  std::unique_ptr<HostCopy> host_copy;         ///< hosted
  std::vector<std::pair<int, int>> elsewhere;  ///< hosted: runs [first, end) of ranks on other hosts
  std::shared_ptr<DerivedSet> derived;

  mutable std::mutex mutex;
  std::condition_variable filled, fetch_wanted;
  std::array<ModeState, kModes> modes;
  Mode mode = Mode::train;
  Forward forward = Forward::none;
  std::vector<std::uint8_t> live;  ///< by id: gathered or being gathered
  std::int64_t live_numel = 0, live_bytes = 0, peak_live_bytes = 0;
  std::int64_t gathers = 0, prefetched = 0, pinned_entries = 0;
  int last_touched = -1;
  bool inference = false;
  std::uint64_t failed_fetches = 0;
  std::string fetch_failure;  ///< the last one's
  std::vector<int> prefetch_queue;
  int prefetching = 0;  ///< entries queued or in flight
  bool stopping = false;
  std::vector<std::thread> prefetch_threads;
  bool ahead_on = false, no_room = false;  ///< hosted: fetching ahead is allowed; it waits for something to be let go
  /// Hosted: others' progress when waiting for it was in vain. Nothing is spared for slower ranks until it changes.
  std::uint64_t impatient_at = 0;
  std::int64_t let_go_early = 0;              ///< hosted: parameters let go although a slower rank had that use before it
  std::chrono::nanoseconds longest_pause{0};  ///< between touches of this turn and the last
  std::chrono::nanoseconds longest_now{0};
  std::chrono::steady_clock::time_point touched_at;
  std::int64_t counted_sent = 0;  ///< of the service's bytes_sent(), what the communicator's counts hold
  Divergence divergence;

  std::atomic<std::int64_t> touches{0}, wait_ns{0}, outside_plan{0}, demanded_bytes{0};
  std::atomic<bool> lockstep{false};
  std::shared_ptr<const std::function<void(int)>> observer;  ///< set between touches only
  std::atomic<bool> observed{false};
  at::Tensor publish_buffer, publish_input;
};

/// For tests that look or reach inside.
StoreState& state_of(ParameterStore& store);

}  // namespace unshard::zero
