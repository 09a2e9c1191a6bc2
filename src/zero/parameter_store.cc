#include "unshard/zero/parameter_store.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "unshard/core/error.h"
#include "unshard/core/log.h"
#include "zero/phase_scope.h"
#include "zero/raw_tensor.h"
#include "zero/registry.h"
#include "zero/state.h"
#include "zero/touch.h"

namespace unshard {
namespace {
#ifdef __SANITIZE_THREAD__                                    // leaves programs little address space
constexpr std::size_t kAddressSpace = std::size_t{16} << 30;  // set aside for growth; only what is written takes memory
#else
constexpr std::size_t kAddressSpace = std::size_t{1} << 40;  // set aside for growth; only what is written takes memory
#endif

TraceOptions trace_options(const StoreOptions& options) {
  return {options.prefetch_numel, options.max_live_numel, options.max_reuse_distance};
}

bool ranks_share_memory(Communicator& comm) {
  auto* host = comm.host();
  return comm.world_size() > 1 && host && host->size() == comm.world_size();
}

bool hosts_share_memory(Communicator& comm) { return comm.world_size() > 1 && !ranks_share_memory(comm) && comm.local_host(); }

std::vector<std::pair<int, int>> ranks_elsewhere(const Communicator& comm) {
  const auto hosts = comm.hosts();
  const int here = hosts[static_cast<std::size_t>(comm.rank())];
  std::vector<std::pair<int, int>> runs;
  for (int rank = 0; rank < comm.world_size(); ++rank) {
    if (hosts[static_cast<std::size_t>(rank)] == here) continue;
    if (!runs.empty() && runs.back().second == rank)
      ++runs.back().second;
    else
      runs.emplace_back(rank, rank + 1);
  }
  return runs;
}
}  // namespace

namespace zero {

StoreState::StoreState(std::shared_ptr<Communicator> communicator, const StoreOptions& store_options)
    : comm(std::move(communicator)),
      options(store_options),
      rank(comm->rank()),
      world(comm->world_size()),
      shared(ranks_share_memory(*comm)),
      hosted(hosts_share_memory(*comm)),
      generation(process_generation()),
      derived(std::make_shared<DerivedSet>()),
      modes{ModeState(trace_options(store_options)), ModeState(trace_options(store_options)), ModeState(trace_options(store_options))} {
  if (shared || hosted) {
    segment = comm->local_host()->create_segment("parameters", 4096, kAddressSpace);
    counters = std::make_unique<WriteCounters>(*comm);
  }
  std::vector<int> nearby;
  if (hosted) {
    host_copy = std::make_unique<HostCopy>(*comm->local_host());
    for (std::size_t i = 0; i < kModes; ++i) modes[i].follower = std::make_unique<PlanFollower>(*host_copy, i);
    elsewhere = ranks_elsewhere(*comm);
    const auto hosts = comm->hosts();
    for (int peer = 0; peer < world; ++peer) {
      if (hosts[static_cast<std::size_t>(peer)] == hosts[static_cast<std::size_t>(rank)]) nearby.push_back(peer);
    }
  }
  if (world == 1 || shared) return;
  const auto find_piece = [this](int id) -> std::optional<std::span<const std::byte>> {
    const std::lock_guard lock(mutex);
    if (id >= static_cast<int>(entries.size())) return std::nullopt;  // this rank has yet to add it
    if (id < 0) return std::span<const std::byte>();
    const Entry& entry = *entries[static_cast<std::size_t>(id)];
    return std::span<const std::byte>(entry.shard, entry.shard ? entry.slice_bytes(rank) : 0);
  };
  service = ShardService::start(*comm, find_piece, nearby, host_copy ? &host_copy->moved() : nullptr);
}

StoreState::~StoreState() {
  stop_prefetch();
  service.reset();  // its thread reads the entries
}

Entry& StoreState::at(int id, const char* where) const {
  require(id >= 0 && id < static_cast<int>(entries.size()), "[zero.", where, "] there is no parameter ", id, "; ids run from 0 to ",
          static_cast<int>(entries.size()) - 1);
  return *entries[static_cast<std::size_t>(id)];
}

at::Tensor StoreState::own_slice(int id) {
  Entry& entry = at(id, "own_slice");
  const auto& info = entry.info;
  if (!info.partitioned || released) return flat_view(entry.parameter, info.layout.begin(rank), info.layout.size(rank));
  return tensor_over(entry.shard, info.layout.size(rank), info.dtype, entry.storage->device(), segment);
}

at::Tensor StoreState::whole_if_local(int id) {
  Entry& entry = at(id, "whole_if_local");
  const auto& info = entry.info;
  if (!info.partitioned || released) return flat_view(entry.parameter, 0, info.layout.numel);
  if (!entry.home || hosted) return {};
  if (counters && entry.unfenced.load()) {
    counters->wait_all_stored(id, info.name);
    entry.unfenced.store(false);
  }
  return tensor_over(entry.home, info.layout.numel, info.dtype, entry.storage->device(), segment);
}

StoreBytes StoreState::bytes() const {
  StoreBytes total;
  for (const auto& entry : entries) {
    const auto& layout = entry->info.layout;
    const auto element_bytes = static_cast<std::int64_t>(entry->element_bytes());
    if (entry->info.partitioned && !released) {
      total.parameters += layout.size(rank) * element_bytes;
      total.padding += (layout.shard_numel() - layout.size(rank)) * element_bytes;
    } else {
      total.parameters += layout.numel * element_bytes;
    }
  }
  return total;
}

ResidencyStats StoreState::stats() const {
  const std::lock_guard lock(mutex);
  ResidencyStats stats{touches.load(), gathers, prefetched, live_bytes, peak_live_bytes, pinned_entries};
  stats.exposed_wait_ms = static_cast<double>(wait_ns.load()) * 1e-6;
  stats.link_bytes = service ? service->bytes_received() : 0;
  stats.outside_plan = outside_plan.load();
  stats.let_go_early = let_go_early;
  if (host_copy) {
    stats.host_live_bytes = host_copy->live_bytes();
    stats.host_peak_live_bytes = host_copy->peak_bytes();
  }
  return stats;
}

}  // namespace zero

struct ParameterStore::State final : zero::StoreState {
  using StoreState::StoreState;
};

struct StoreAccess {
  static zero::StoreState& state_of(ParameterStore& store) { return *store.state_; }
};
zero::StoreState& zero::state_of(ParameterStore& store) { return StoreAccess::state_of(store); }

std::shared_ptr<ParameterStore> ParameterStore::create(std::shared_ptr<Communicator> comm, const StoreOptions& options) {
  zero::install_touch();
  const zero::Unobserved quiet;
  return std::shared_ptr<ParameterStore>(new ParameterStore(std::move(comm), options));
}

ParameterStore::ParameterStore(std::shared_ptr<Communicator> comm, const StoreOptions& options)
    : state_(std::make_unique<State>(std::move(comm), options)) {
  state_->owner = this;
}

ParameterStore::~ParameterStore() {
  if (state_->generation != zero::process_generation()) {
    (void)state_.release();  // a forked child: its threads and peers are the parent's
    return;
  }
  try {
    state_->release_all(/*communicate=*/false);
  } catch (const std::exception& error) {
    log_warning(state_->rank, cat("a parameter store was destroyed and could not give its parameters back: ", error.what()));
  }
}

int ParameterStore::add(const at::Tensor& parameter, const std::string& name, bool partitioned) {
  return state_->add(parameter, name, partitioned);
}
void ParameterStore::rename(int id, const std::string& name) { state_->rename(id, name); }

void ParameterStore::set_options(const StoreOptions& options) {
  const std::lock_guard lock(state_->mutex);
  state_->options = options;
  for (auto& mode : state_->modes) {
    mode.trace.set_options(trace_options(options));
    mode.plan_is_old = true;
  }
}

int ParameterStore::find(const at::Tensor& tensor) const {
  if (!tensor.defined() || !tensor.has_storage()) return -1;
  const auto* entry = zero::find_entry(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  return entry && entry->store == state_.get() ? entry->info.id : -1;
}

int ParameterStore::size() const { return static_cast<int>(state_->entries.size()); }
const ParameterInfo& ParameterStore::info(int id) const { return state_->at(id, "info").info; }
const at::Tensor& ParameterStore::parameter(int id) const { return state_->at(id, "parameter").parameter; }
at::Tensor ParameterStore::own_slice(int id) { return state_->own_slice(id); }
at::Tensor ParameterStore::whole_if_local(int id) { return state_->whole_if_local(id); }
std::vector<int> ParameterStore::settle() { return state_->settle(); }
void ParameterStore::check_storages() { state_->check_storages(); }
void ParameterStore::publish(const std::vector<std::uint8_t>& updated) { state_->publish(updated); }

void ParameterStore::publish_one(int id) {
  state_->at(id, "publish_one");
  std::vector<std::uint8_t> updated(state_->entries.size());
  updated[static_cast<std::size_t>(id)] = 1;
  state_->publish(updated);
}

void ParameterStore::pin(const std::vector<int>& ids) {
  require(!state_->released, "[zero.pin] the store has released its parameters");
  state_->pin_all(ids);
}

void ParameterStore::unpin(const std::vector<int>& ids) {
  for (const int id : ids) {
    auto& entry = state_->at(id, "unpin");
    if (entry.info.partitioned && !state_->released) state_->unpin(entry, false);
  }
}

void ParameterStore::begin_edit(const std::vector<int>& ids) { state_->begin_edit(ids); }
void ParameterStore::end_edit(const std::vector<int>& ids, int modifier) { state_->end_edit(ids, modifier); }
void ParameterStore::enter_inference() { state_->enter_inference(); }
void ParameterStore::leave_inference() { state_->leave_inference(); }
void ParameterStore::release_gathered() { state_->release_gathered(); }

void ParameterStore::begin_step(std::int64_t step) {
  state_->comm->set_step(step);
  state_->begin_step();
}
void ParameterStore::begin_forward() { state_->begin_forward(); }
void ParameterStore::end_forward() { state_->end_forward(); }

void ParameterStore::set_lockstep_writes(bool on) { state_->lockstep = on; }
void ParameterStore::release_all() { state_->release_all(/*communicate=*/true); }
ResidencyStats ParameterStore::stats() const { return state_->stats(); }

void ParameterStore::reset_peak() {
  const std::lock_guard lock(state_->mutex);
  state_->peak_live_bytes = state_->live_bytes;
  if (state_->host_copy) state_->host_copy->reset_peak();
}

StoreBytes ParameterStore::bytes() const { return state_->bytes(); }
Communicator& ParameterStore::comm() const { return *state_->comm; }
bool ParameterStore::shares_memory() const { return state_->shared; }

void ParameterStore::set_touch_observer(std::function<void(int)> observer) {
  state_->observed = false;
  state_->observer = observer ? std::make_shared<const std::function<void(int)>>(std::move(observer)) : nullptr;
  state_->observed = state_->observer != nullptr;
}

std::shared_ptr<ParameterStore> store_of(const at::Tensor& tensor, int* id) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const auto* entry = zero::find_entry(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  if (!entry) return nullptr;
  if (id) *id = entry->info.id;
  return entry->store->owner->weak_from_this().lock();
}

Whole::Whole(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    int id = -1;
    auto store = store_of(tensor, &id);
    if (!store) continue;
    const auto same = std::find_if(held_.begin(), held_.end(), [&](const auto& held) { return held.first == store; });
    if (same == held_.end())
      held_.emplace_back(std::move(store), std::vector<int>{id});
    else
      same->second.push_back(id);
  }
  std::size_t done = 0;
  try {
    for (; done < held_.size(); ++done) held_[done].first->pin(held_[done].second);
  } catch (...) {
    while (done-- > 0) held_[done].first->unpin(held_[done].second);
    throw;
  }
}

Whole::~Whole() {
  for (auto& [store, ids] : held_) store->unpin(ids);
}

}  // namespace unshard
