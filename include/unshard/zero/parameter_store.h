#pragma once
// The heart: parameters that rest as shards and materialise when an operator touches them. See ARCHITECTURE.md section 1.
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "unshard/zero/layout.h"

namespace at {
class Tensor;
}

namespace unshard {

class Communicator;

struct StoreOptions {
  std::int64_t max_live_numel = 1'000'000'000;      ///< elements gathered at once; JSON stage3_max_live_parameters
  std::int64_t max_reuse_distance = 1'000'000'000;  ///< release at once what is used again only after this many elements
  std::int64_t prefetch_numel = 50'000'000;         ///< elements fetched ahead along the trace; 0: none
  std::int64_t allgather_bucket_numel = 500'000'000;
  bool debug = false;  ///< ranks that wrote different values to one parameter: an error, not a warning
};

/// What a store knows of one parameter.
struct ParameterInfo {
  int id = -1;
  std::string name;
  std::vector<std::int64_t> sizes;
  c10::ScalarType dtype{};
  ShardLayout layout;
  bool partitioned = false;  ///< false: whole on every rank (stages 0-2, persistent ones); it has no key and plain storage
};

/// Counters; bytes are of full parameters in the compute dtype.
struct ResidencyStats {
  std::int64_t touches = 0;     ///< operators that received a partitioned parameter
  std::int64_t gathers = 0;     ///< times bytes were brought in from other ranks (0 in shared memory)
  std::int64_t prefetched = 0;  ///< of them started before their touch
  std::int64_t live_bytes = 0;  ///< private whole copies held now: gathered or written-to (0 in shared memory when nothing was written)
  std::int64_t peak_live_bytes = 0;  ///< since reset_peak()
  std::int64_t pinned = 0;           ///< parameters some operator or scope holds now
  double exposed_wait_ms = 0;        ///< touches and pins waited so long, together, for bytes of other ranks
  std::int64_t link_bytes = 0;       ///< received from other ranks by this one, outside shared memory
  std::int64_t outside_plan = 0;     ///< touches that the plan agreed by all ranks didn't foresee (several hosts)
  std::int64_t let_go_early = 0;     ///< let go before a slower rank of the host had used it, which may fetch it again (several hosts)
  std::int64_t host_live_bytes = 0;  ///< several hosts: memory of this host set aside for other hosts' pieces, now and at most
  std::int64_t host_peak_live_bytes = 0;
};

/// Bytes at rest on this rank (shared memory: this rank's part).
struct StoreBytes {
  std::int64_t parameters = 0, padding = 0;
};

/// Owns the resting place of a model's parameters on one rank. Ranks must add the same parameters in the same order.
/// Partitioned parameters of a host with shared memory rest in one SharedSegment that all ranks map: a gather moves nothing.
/// With several hosts each has one such copy: the other hosts' pieces are brought in once a host, by whichever rank needs them first or
/// ahead of use by a plan, and let go within the budget (max_live_numel then counts elements of other hosts' pieces, per host).
/// Without shared memory shards are private and a touch pulls the other ranks' pieces one-sided (a serving thread per rank), so that ranks
/// may touch different parameters, a different number of times, without any agreement.
///
/// Thread-safety: touches from any thread; the other calls from one thread at a time per store.
class ParameterStore : public std::enable_shared_from_this<ParameterStore> {
 public:
  /// Collective. Installs the dispatcher handlers on first use in the process.
  static std::shared_ptr<ParameterStore> create(std::shared_ptr<Communicator> comm, const StoreOptions& options = {});
  ~ParameterStore();  ///< as release_all(), without communication: values that can't be read locally stay an error by name

  /// Register `parameter` (dense; any strides that are non-overlapping and dense). With `partitioned` its storage is emptied, its bytes
  /// move to the resting place, and the out-of-core keys are set; shape, strides, dtype, version, requires_grad stay. Parameters with
  /// 0 elements and views of a storage that another parameter owns are kept whole. Not communicating; every rank adds in the same order.
  /// Initial values: each rank contributes its own slice of its own value.
  /// \return id, counted from 0. \throws std::invalid_argument sparse, meta, owned by another store (named), no storage.
  int add(const at::Tensor& parameter, const std::string& name, bool partitioned);
  /// Give names later than add (zero.Init knows only the path inside the module that was being built).
  void rename(int id, const std::string& name);
  void set_options(const StoreOptions& options);  ///< as add: same on every rank

  /// id of the parameter whose storage this is (also for views and aliases), or -1.
  int find(const at::Tensor& tensor) const;
  int size() const;
  const ParameterInfo& info(int id) const;
  const at::Tensor& parameter(int id) const;  ///< the user's tensor (same TensorImpl)

  /// This rank's piece in the compute dtype, flat [layout.size(rank)], aliasing where it rests. Write it only between two agreed
  /// points (the optimizer's update). For parameters kept whole: the piece of the whole tensor.
  at::Tensor own_slice(int id);
  /// The whole value where it rests, flat [numel]: parameters kept whole, or shared memory / world of one; undefined tensor otherwise.
  at::Tensor whole_if_local(int id);

  /// Agreed point, collective: replaced storages (`w.data = x`, `.to()`) are adopted again, values written through operators since the
  /// last agreed point move to the shards (each rank keeps its own slice), then ranks fence. Ranks that wrote different parameters:
  /// a warning naming them. \return ids whose value the user changed here or elsewhere (masters must be refreshed).
  std::vector<int> settle();
  /// Cheap local half of settle: adopt replaced storages again, attach nothing, no communication. Called before forward and in hooks.
  void check_storages();

  /// Collective, after the optimizer wrote own_slice() of the parameters with updated[id] != 0: parameters kept whole are all-gathered
  /// (buckets of allgather_bucket_numel), gathered copies are dropped, version counters are bumped, ranks fence.
  void publish(const std::vector<std::uint8_t>& updated);
  /// Collective. The same for one parameter kept whole or partitioned whose own slices were written (safe_set_full_*).
  void publish_one(int id);

  /// Make parameters whole and readable below the dispatcher (data_ptr, numpy) until the matching unpin. Not collective.
  void pin(const std::vector<int>& ids);
  void unpin(const std::vector<int>& ids);
  /// Like pin, but each rank gets a private copy that it may write in any way. Not collective.
  void begin_edit(const std::vector<int>& ids);
  /// Collective: rank `modifier`'s private copy becomes the value everywhere; other ranks' edits are dropped.
  void end_edit(const std::vector<int>& ids, int modifier);

  /// Collective: gather everything once and keep it; no communication until leave_inference().
  void enter_inference();
  void leave_inference();
  /// Drop gathered copies that nothing pins (memory that isn't shared).
  void release_gathered();
  /// A new step begins: the trace of touches is replayed from its start (prefetch), counters of the step restart.
  void begin_step(std::int64_t step);
  /// The model's forward begins and ends. One that begins with gradients off is an evaluation, whose touches have a trace and a plan of
  /// their own. Not collective, and not needed: touches without gradients outside it, before those of the step, count as generation.
  void begin_forward();
  void end_forward();

  /// Values written inside are published at release (each rank its own slice) instead of at the next agreed point, so that no rank holds
  /// the whole model while all ranks run the same initialisation (zero.Init). A read then waits until every rank has written.
  void set_lockstep_writes(bool on);

  /// Back to plain torch: whole values in private storages, no keys. Collective when bytes must be fetched. Idempotent.
  void release_all();

  ResidencyStats stats() const;
  void reset_peak();
  StoreBytes bytes() const;
  Communicator& comm() const;
  bool shares_memory() const;  ///< partitioned parameters rest in memory that all ranks map

  /// Called on every rank-local touch with (id, phase-free name); used for phases and tests. Keep it cheap; null: none.
  void set_touch_observer(std::function<void(int)> observer);

 private:
  explicit ParameterStore(std::shared_ptr<Communicator> comm, const StoreOptions& options);
  friend struct StoreAccess;  // src/zero internals
  struct State;
  std::unique_ptr<State> state_;
};

/// The store that owns `tensor`'s storage and the id in it, or nullptr: for face code that only has a tensor.
std::shared_ptr<ParameterStore> store_of(const at::Tensor& tensor, int* id = nullptr);

/// RAII pin for raw access: `Whole scope({w}); use(w.data_ptr());`. Tensors that no store owns are passed over.
class Whole {
 public:
  explicit Whole(const std::vector<at::Tensor>& tensors);
  ~Whole();
  Whole(const Whole&) = delete;
  Whole& operator=(const Whole&) = delete;

 private:
  std::vector<std::pair<std::shared_ptr<ParameterStore>, std::vector<int>>> held_;
};

}  // namespace unshard
