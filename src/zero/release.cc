// Parameters become plain torch tensors again.
#include <c10/core/CPUAllocator.h>

#include <cstring>

#include "unshard/core/error.h"
#include "unshard/core/log.h"
#include "zero/key.h"
#include "zero/phase_scope.h"
#include "zero/raw_tensor.h"
#include "zero/registry.h"
#include "zero/state.h"

namespace unshard::zero {
namespace {

// The storage itself is filled, so that views of the parameter that live on (they keep the key) read the value too.
void give_back(Entry& entry, at::DataPtr whole, bool readable) {
  auto& storage = *entry.storage;
  if (readable) {
    clear_unreadable_message(storage);
  } else {
    set_unreadable_message(
        storage, cat("parameter '", entry.info.name, "': its engine was destroyed without a collective destroy(), and only a shard of ",
                     "it was on this rank"));
  }
  storage.set_data_ptr_noswap(std::move(whole));
  storage.set_allocator(entry.original_allocator);
  storage.set_resizable(entry.original_resizable && readable);
  if (!readable) make_unreadable(storage);
  remove_touch_keys(entry.parameter);
  for (const auto& tensor : entry.tied) remove_touch_keys(tensor);
}

// The private copy, the resting place of a world of one, or a copy of shared memory; empty: it must be fetched.
at::DataPtr take_whole(StoreState& state, Entry& entry, bool communicate) {
  if (entry.residence == Residence::gathered || entry.residence == Residence::written) return std::move(entry.copy);
  if (state.world == 1) return std::move(entry.home_owner);
  if (!entry.home) return {};
  if (state.counters && entry.unfenced.load()) {
    if (!communicate && !state.counters->all_stored(entry.info.id)) return {};  // incomplete, and nobody may be left to wait for
    if (communicate) state.counters->wait_all_stored(entry.info.id, entry.info.name);
  }
  if (entry.elsewhere_numel > 0) return {};
  auto whole = c10::GetAllocator(c10::kCPU)->allocate(entry.whole_bytes());
  std::memcpy(whole.get(), entry.home, entry.whole_bytes());
  return whole;
}

}  // namespace

void StoreState::release_all(bool communicate) {
  if (released) return;
  for (const auto& entry : entries) {
    require(entry->pins == 0 || !communicate, "[zero.release_all] parameter '", entry->info.name,
            "' is in use by an operator or a scope on another thread");
  }
  const Unobserved quiet;
  drain_prefetch();
  derived->detach_all(communicate || !service);
  std::vector<Entry*> missing;
  std::vector<std::pair<Entry*, at::DataPtr>> wholes;
  std::vector<std::byte*> to;
  for (const auto& entry : entries) {
    if (!entry->info.partitioned) continue;
    auto whole = take_whole(*this, *entry, communicate);
    const bool missed = !whole.get() && service;
    if (missed && communicate) {
      whole = allocate(*entry);
      missing.push_back(entry.get());
      to.push_back(static_cast<std::byte*>(whole.get()));
    }
    wholes.emplace_back(entry.get(), std::move(whole));
  }
  if (!missing.empty()) load_whole(missing, to);
  if (service && communicate) comm->barrier("release_all: peers have fetched");  // shards and serving thread must outlive their fetches
  released = true;
  stop_prefetch();
  service.reset();  // before the shards go, from which a peer's last request may still be served
  for (auto& [entry, whole] : wholes) {
    const bool readable = whole.get() != nullptr;
    if (!readable) whole = at::DataPtr(nullptr, entry->storage->device());
    give_back(*entry, std::move(whole), readable);
  }
  for (const auto& entry : entries) {
    unregister_storage(entry->known_storage, entry.get());
    entry->residence = Residence::at_rest;
    entry->home = entry->shard = nullptr;
    entry->home_owner.clear();
  }
  publish_buffer = publish_input = at::Tensor();
}

}  // namespace unshard::zero
