// Private copies of partitioned parameters: made at a touch, kept within the budget, let go.
#include <c10/core/CPUAllocator.h>

#include <chrono>
#include <cstring>
#include <optional>

#include "unshard/core/error.h"
#include "zero/gather_span.h"
#include "zero/gathered_count.h"
#include "zero/key.h"
#include "zero/phase_scope.h"
#include "zero/raw_tensor.h"
#include "zero/registry.h"
#include "zero/state.h"

namespace unshard::zero {
namespace {

bool is_available(StoreState& state, Entry& entry) {
  return entry.residence == Residence::gathered || entry.residence == Residence::written ||
         (entry.residence == Residence::at_rest && entry.home && state.readable_at_home(entry));
}

void point_storage_at(Entry& entry, void* data) {
  entry.storage->set_data_ptr_noswap(c10::DataPtr(data, entry.storage->device()));
  if (entry.pins == 0) make_unreadable(*entry.storage);
}

void acquire(StoreState& state, Entry& entry) {
  if (entry.pins++ > 0) return;
  ++state.pinned_entries;
  make_readable(*entry.storage);
}

// Farthest next use first, until `limit` elements are live or only pinned and written copies are left.
void release_until(StoreState& state, std::int64_t limit) {
  if (state.live_numel <= limit) return;
  std::vector<int> candidates;
  for (const auto& entry : state.entries) {
    if (entry->residence == Residence::gathered && entry->pins == 0 && !entry->home) candidates.push_back(entry->info.id);
  }
  if (candidates.empty()) return;
  for (const int id : state.trace().release_order(candidates)) {
    state.release_copy(*state.entries[static_cast<std::size_t>(id)]);
    if (state.live_numel <= limit) return;
  }
}

// Room in the budget for one more copy. \return false after waiting for a prefetch, which holds its room until it ends: look again.
// \throws CommError one failed.
bool make_room(StoreState& state, const Entry& entry, std::unique_lock<std::mutex>& lock) {
  if (entry.home || state.inference) return true;
  const auto limit = state.options.max_live_numel - entry.info.layout.numel;
  release_until(state, limit);
  if (state.live_numel <= limit || state.prefetching == 0) return true;
  const auto failures = state.failed_fetches;
  state.filled.wait(lock);
  if (state.failed_fetches != failures) throw CommError(state.fetch_failure);
  return false;
}

// While another thread fills it. Lock held on entry and exit. \throws CommError it failed.
void wait_for_fill(StoreState& state, Entry& entry, std::unique_lock<std::mutex>& lock) {
  const auto failures = entry.failed_fills;
  state.filled.wait(lock);
  if (entry.failed_fills != failures) throw CommError(state.fetch_failure);
}

void let_go(StoreState& state, Entry& entry) {
  if (state.live_numel > state.options.max_live_numel) return release_until(state, state.options.max_live_numel);
  const auto distance = state.trace().distance_to_next_use(entry.info.id);
  if (distance != INT64_MAX && distance > state.options.max_reuse_distance) state.release_copy(entry);
}

}  // namespace

Pinned Entry::pin(Access access) { return store->pin(*this, access); }
void Entry::unpin(bool abandon) noexcept { store->unpin(*this, abandon); }
void Entry::finish_lockstep_write() { store->finish_lockstep_write(*this); }
void Entry::derive(const at::Tensor& result) { derive_cast(*this, result, store->derived); }

void StoreState::check_process(const Entry& entry) const {
  if (generation == process_generation()) [[likely]]
    return;
  throw std::runtime_error(cat("[zero.touch] parameter '", entry.info.name,
                               "' is partitioned and was touched in a forked process (a data loader's ",
                               "worker?), which takes no part in its group; copy what the worker needs with clone() before the fork"));
}

at::DataPtr StoreState::allocate(const Entry& entry) const {
  return c10::GetAllocator(entry.storage->device_type())->allocate(entry.padded_bytes());
}

void StoreState::begin_fill(Entry& entry) {
  entry.residence = Residence::filling;
  entry.fill_epoch = entry.epoch.load();
  live[static_cast<std::size_t>(entry.info.id)] = 1;
  live_numel += entry.info.layout.numel;
  live_bytes += static_cast<std::int64_t>(entry.whole_bytes());
  peak_live_bytes = std::max(peak_live_bytes, live_bytes);
  count_gathered(*this);
}

void StoreState::fail_fill(Entry& entry) {
  entry.residence = Residence::at_rest;
  live[static_cast<std::size_t>(entry.info.id)] = 0;
  live_numel -= entry.info.layout.numel;
  live_bytes -= static_cast<std::int64_t>(entry.whole_bytes());
  count_gathered(*this);
  filled.notify_all();
}

void StoreState::fail_fills(const std::vector<Entry*>& filling, const CommError& error) {
  ++failed_fetches;
  fetch_failure = error.what();
  for (auto* entry : filling) {
    ++entry->failed_fills;
    fail_fill(*entry);
  }
}

bool StoreState::install_copy(Entry& entry, at::DataPtr copy, Residence residence, bool loaded) {
  if (loaded && entry.fill_epoch != entry.epoch.load()) {
    fail_fill(entry);
    return false;
  }
  entry.copy = std::move(copy);
  entry.residence = residence;
  entry.stale = false;
  point_storage_at(entry, entry.copy.get());
  filled.notify_all();
  return true;
}

void StoreState::release_copy(Entry& entry) {
  point_storage_at(entry, entry.home);
  entry.copy.clear();
  entry.stale = false;
  fail_fill(entry);
}

void StoreState::move_on(const std::vector<int>& ids) {
  const std::lock_guard lock(mutex);
  for (const int id : ids) {
    Entry& entry = *entries[static_cast<std::size_t>(id)];
    ++entry.epoch;
    if (entry.residence != Residence::gathered) continue;
    entry.stale = true;
    if (entry.pins == 0) release_copy(entry);
  }
}

void StoreState::fetch(const std::vector<ShardService::Request>& requests, const std::vector<Entry*>& wanted) {
  try {
    service->fetch(requests);
  } catch (const CommError& error) {
    const auto* host = comm->local_host();
    throw CommError(cat(error.what(), "; '", names_of(wanted), "' is needed in step ", comm->step(),
                        host ? cat(", ", phase_name(host->phase_of(host->rank()))) : "", "; this is rank ", rank, " of ", world));
  }
}

void StoreState::load_whole(const std::vector<Entry*>& loaded, const std::vector<std::byte*>& to) {
  std::vector<ShardService::Request> requests;
  std::vector<Entry*> wanted;
  for (std::size_t i = 0; i < loaded.size(); ++i) {
    Entry& entry = *loaded[i];
    if (entry.elsewhere_numel > 0) {
      bring_in({&entry});
      std::memcpy(to[i], entry.home, entry.whole_bytes());
      drop_holds({&entry});
      continue;
    }
    if (entry.home) {
      std::memcpy(to[i], entry.home, entry.whole_bytes());
      continue;
    }
    std::memcpy(to[i] + entry.slice_offset(rank), entry.shard, entry.slice_bytes(rank));
    const auto shard_bytes = static_cast<std::size_t>(entry.info.layout.shard_numel()) * entry.element_bytes();
    requests.push_back({entry.info.id, to[i], shard_bytes, entry.whole_bytes()});
    wanted.push_back(&entry);
  }
  if (!requests.empty()) fetch(requests, wanted);
}

namespace {

// Time that somebody waits for bytes of other ranks.
class Waiting {
 public:
  Waiting(StoreState& state, Entry& entry) : state_(state), span_(state.comm->timeline(), Lane::gather, "wait", {&entry}) {}
  ~Waiting() { state_.wait_ns += std::chrono::nanoseconds(std::chrono::steady_clock::now() - started_).count(); }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  StoreState& state_;
  const std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  const GatherSpan span_;
};

// Lock held on entry and exit, not in between. at_rest -> gathered or written, or at_rest: the value has changed meanwhile.
bool fill(StoreState& state, Entry& entry, Access access, std::unique_lock<std::mutex>& lock) {
  state.begin_fill(entry);
  lock.unlock();
  at::DataPtr copy;
  try {
    std::optional<Waiting> waiting;
    if (!entry.home) waiting.emplace(state, entry);
    copy = state.allocate(entry);
    if (access != Access::overwrite) state.load_whole({&entry}, {static_cast<std::byte*>(copy.get())});
  } catch (const CommError& error) {
    lock.lock();
    state.fail_fills({&entry}, error);
    throw;
  } catch (...) {
    lock.lock();
    state.fail_fill(entry);
    throw;
  }
  lock.lock();
  if (!entry.home && access != Access::overwrite) ++state.gathers;
  const auto residence = access == Access::read ? Residence::gathered : Residence::written;
  return state.install_copy(entry, std::move(copy), residence, /*loaded=*/access != Access::overwrite);
}

// Lock held on entry and exit, not in between. Present on this host, with this rank as a user, unless the value has changed meanwhile.
void bring_home(StoreState& state, Entry& entry, std::unique_lock<std::mutex>& lock) {
  entry.residence = Residence::filling;
  lock.unlock();
  const auto finish = [&](bool held) {
    lock.lock();
    entry.residence = Residence::at_rest;
    entry.held = held && state.host_copy->presence(entry.info.id, entry.epoch.load()) == Presence::present;
    if (held && !entry.held) state.host_copy->drop(entry.info.id);
    state.filled.notify_all();
  };
  try {
    state.bring_in({&entry});
  } catch (const CommError& error) {
    finish(false);
    ++entry.failed_fills;
    state.fetch_failure = error.what();
    throw;
  } catch (...) {
    finish(false);
    throw;
  }
  finish(true);
}

// Makes the entry fit for `access` and pins it. \return whether its copy was made without the old value.
bool make_fit(StoreState& state, Entry& entry, Access access) {
  const bool writes = access != Access::read;
  const bool in_place = state.world == 1;
  bool fresh = false;
  std::unique_lock lock(state.mutex);
  for (;;) {
    if (entry.residence == Residence::filling) {
      const Waiting waiting(state, entry);
      wait_for_fill(state, entry, lock);
    } else if ((!writes || in_place || entry.residence != Residence::at_rest) && is_available(state, entry)) {
      break;
    } else if (!writes && entry.elsewhere_numel > 0) {
      bring_home(state, entry, lock);
    } else if (make_room(state, entry, lock)) {
      fresh = fill(state, entry, access, lock) && access == Access::overwrite;
    }
  }
  if (writes) {
    entry.changed = true;
    if (!in_place) entry.residence = Residence::written;
  }
  acquire(state, entry);
  state.follow(entry);
  return fresh;
}

// In lockstep only the outermost write of nested operators runs the protocol.
bool begins_lockstep_write(StoreState& state, Entry& entry) {
  if (state.world == 1 || !state.lockstep.load(std::memory_order_relaxed)) return false;
  const std::lock_guard lock(state.mutex);
  return entry.pins == 0 || entry.residence != Residence::written;
}

}  // namespace

Pinned StoreState::pin(Entry& entry, Access access, bool in_lockstep) {
  check_process(entry);
  touches.fetch_add(1, std::memory_order_relaxed);
  if (observed.load(std::memory_order_relaxed)) [[unlikely]]
    (*observer)(entry.info.id);
  if (access == Access::read && !entry.unfenced.load(std::memory_order_acquire)) [[likely]] {
    const std::lock_guard lock(mutex);
    if (is_available(*this, entry)) [[likely]] {
      acquire(*this, entry);
      follow(entry);
      return {};
    }
  }
  const Unobserved quiet;
  try {
    return fetch_and_pin(entry, access, in_lockstep);
  } catch (const CommError& error) {
    comm->fail(error.what());  // whoever waits for this rank then hears why, not just that it ended
    throw;
  }
}

Pinned StoreState::fetch_and_pin(Entry& entry, Access access, bool in_lockstep) {
  Pinned pinned;
  pinned.lockstep_write = in_lockstep && access != Access::read && begins_lockstep_write(*this, entry);
  if (counters && access != Access::overwrite && entry.unfenced.load(std::memory_order_acquire)) {
    counters->wait_all_stored(entry.info.id, entry.info.name);
    entry.unfenced.store(false, std::memory_order_release);
  }
  pinned.fresh_copy = make_fit(*this, entry, access);
  if (!pinned.lockstep_write) return pinned;
  try {
    if (shared)
      counters->start(entry.info.id);
    else
      comm->barrier(cat("lockstep write of '", entry.info.name, "'"));
  } catch (...) {
    unpin(entry, pinned.fresh_copy);
    throw;
  }
  return pinned;
}

void StoreState::finish_lockstep_write(Entry& entry) {
  const Unobserved quiet;
  if (shared) counters->wait_all_started(entry.info.id, entry.info.name);
  {
    const std::lock_guard lock(mutex);
    std::memcpy(entry.shard, static_cast<std::byte*>(entry.copy.get()) + entry.slice_offset(rank), entry.slice_bytes(rank));
    entry.residence = Residence::gathered;
    entry.stale = true;
  }
  if (shared) {
    counters->stored(entry.info.id);
    entry.unfenced.store(true, std::memory_order_release);
  } else {
    comm->barrier(cat("lockstep write of '", entry.info.name, "' is stored"));
    move_on({entry.info.id});
  }
}

void StoreState::unpin(Entry& entry, bool abandon) noexcept {
  const std::lock_guard lock(mutex);
  if (--entry.pins > 0 || released) return;
  --pinned_entries;
  make_unreadable(*entry.storage);
  if (entry.held) {
    host_copy->drop(entry.info.id);
    entry.held = false;
    shrink_to_budget();
  }
  if (entry.stale || (abandon && entry.residence == Residence::written)) return release_copy(entry);
  if (entry.residence == Residence::gathered && !entry.home && !inference) let_go(*this, entry);
}

namespace {

// Private memory: what isn't here travels in one message a peer; pins find it resident then.
void fill_together(StoreState& state, const std::vector<int>& ids) {
  std::vector<Entry*> fetched;
  std::vector<at::DataPtr> copies;
  std::unique_lock lock(state.mutex);
  try {
    for (const int id : ids) {
      Entry& entry = state.at(id, "pin");
      while (entry.info.partitioned && entry.residence == Residence::at_rest && !make_room(state, entry, lock)) {
      }
      if (!entry.info.partitioned || entry.residence != Residence::at_rest || entry.unfenced.load()) continue;
      state.begin_fill(entry);
      fetched.push_back(&entry);
    }
    if (fetched.empty()) return;
    lock.unlock();
    const GatherSpan span(state.comm->timeline(), Lane::gather, "wait", fetched);
    std::vector<std::byte*> to;
    for (const auto* entry : fetched) to.push_back(static_cast<std::byte*>(copies.emplace_back(state.allocate(*entry)).get()));
    state.load_whole(fetched, to);
    lock.lock();
  } catch (const CommError& error) {
    if (!lock.owns_lock()) lock.lock();
    state.fail_fills(fetched, error);
    throw;
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    for (auto* entry : fetched) state.fail_fill(*entry);
    throw;
  }
  state.gathers += static_cast<std::int64_t>(fetched.size());
  for (std::size_t i = 0; i < fetched.size(); ++i) state.install_copy(*fetched[i], std::move(copies[i]), Residence::gathered);
}

}  // namespace

void StoreState::pin_all(const std::vector<int>& ids) {
  for (const int id : ids) check_process(at(id, "pin"));  // before anything is marked as being fetched
  try {
    fetch_and_pin_all(ids);
  } catch (const CommError& error) {
    comm->fail(error.what());
    throw;
  }
}

void StoreState::fetch_and_pin_all(const std::vector<int>& ids) {
  struct Holds {
    StoreState& state;
    std::vector<Entry*> entries;
    ~Holds() { state.drop_holds(entries); }
  } holds{*this, {}};
  if (host_copy) {
    std::vector<Entry*> wanted;
    {
      const std::lock_guard lock(mutex);
      for (const int id : ids) {
        Entry& entry = at(id, "pin");
        if (entry.elsewhere_numel > 0 && entry.residence == Residence::at_rest && !entry.unfenced.load()) wanted.push_back(&entry);
      }
    }
    const Unobserved quiet;
    bring_in(wanted);
    holds.entries = std::move(wanted);
  } else if (service) {
    const Unobserved quiet;
    fill_together(*this, ids);
  }
  std::size_t done = 0;
  try {
    for (; done < ids.size(); ++done) {
      if (Entry& entry = at(ids[done], "pin"); entry.info.partitioned) pin(entry, Access::read);
    }
  } catch (...) {
    while (done-- > 0) {
      if (Entry& entry = at(ids[done], "pin"); entry.info.partitioned) unpin(entry, false);
    }
    throw;
  }
}

void StoreState::release_gathered() {
  drain_prefetch();
  const std::lock_guard lock(mutex);
  for (const auto& entry : entries) {
    if (entry->residence == Residence::gathered && entry->pins == 0) release_copy(*entry);
    if (entry->elsewhere_numel > 0) let_memory_go(*entry);
  }
}

void StoreState::follow(Entry& entry) {
  if (host_copy)
    follow_plan(entry);
  else if (service)
    follow_trace(entry);
}

void StoreState::mark_fenced() {
  for (const auto& entry : entries) entry->unfenced.store(false, std::memory_order_release);
}

}  // namespace unshard::zero
