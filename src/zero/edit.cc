// Scopes in which one rank changes parameters in any way, also below the dispatcher; and the scope of inference.
#include <cstring>

#include "unshard/core/error.h"
#include "zero/key.h"
#include "zero/phase_scope.h"
#include "zero/raw_tensor.h"
#include "zero/state.h"

namespace unshard::zero {
namespace {

void broadcast_bytes(StoreState& state, const Entry& entry, std::byte* data, c10::Device device, int root) {
  auto bytes = tensor_over(data, static_cast<std::int64_t>(entry.whole_bytes()), c10::kByte, device, nullptr);
  state.comm->broadcast(bytes, root, cat("end_edit '", entry.info.name, "'"));
}

// Shared memory: the modifier writes the value where it rests; all others only wait.
void share_edits(StoreState& state, const std::vector<Entry*>& edited, int modifier) {
  if (state.rank == modifier) {
    for (auto* entry : edited) {
      if (entry->info.partitioned) std::memcpy(entry->home, entry->copy.get(), entry->whole_bytes());
    }
  }
  state.comm->barrier("end_edit: the value is stored");
}

void drop_edit(StoreState& state, Entry& entry) {
  {
    const std::lock_guard lock(state.mutex);
    entry.editing = false;
    entry.changed = true;
    if (entry.info.partitioned && state.world > 1) {
      entry.residence = Residence::gathered;  // no longer a value of this rank's own
      entry.stale = true;
    }
  }
  if (entry.info.partitioned) state.unpin(entry, false);
}

}  // namespace

void StoreState::begin_edit(const std::vector<int>& ids) {
  for (const int id : ids) {
    const Entry& entry = at(id, "begin_edit");
    require(!entry.editing, "[zero.begin_edit] parameter '", entry.info.name, "' is being edited already");
  }
  std::size_t done = 0;
  try {
    for (; done < ids.size(); ++done) {
      Entry& entry = at(ids[done], "begin_edit");
      if (entry.info.partitioned) pin(entry, Access::write, /*in_lockstep=*/false);  // an edit settles at its end
      entry.editing = true;
    }
  } catch (...) {
    while (done-- > 0) {
      Entry& entry = at(ids[done], "begin_edit");
      entry.editing = false;
      if (entry.info.partitioned) unpin(entry, false);
    }
    throw;
  }
}

void StoreState::end_edit(const std::vector<int>& ids, int modifier) {
  require(modifier >= 0 && modifier < world, "[zero.end_edit] modifier rank ", modifier, " is not in 0..", world - 1);
  std::vector<Entry*> edited;
  for (const int id : ids) {
    Entry& entry = at(id, "end_edit");
    require(entry.editing, "[zero.end_edit] parameter '", entry.info.name, "' isn't being edited; begin_edit comes first");
    edited.push_back(&entry);
  }
  const Unobserved quiet;
  drain_prefetch();
  if (world > 1) {
    // A slower rank may still fetch the value before. No limit but the time-out: the modifier may be at it for long.
    comm->barrier(cat("end of the edit (GatheredParameters) of '", edited.empty() ? std::string() : edited.front()->info.name, "'",
                      edited.size() > 1 ? cat(" and ", edited.size() - 1, " more") : std::string()));
    if (shared) share_edits(*this, edited, modifier);
    for (auto* entry : edited) {
      if (!entry->info.partitioned) {
        if (entry->info.layout.numel > 0) broadcast_bytes(*this, *entry, entry->whole_data(), entry->parameter.device(), modifier);
      } else if (!shared) {
        auto* copy = static_cast<std::byte*>(entry->copy.get());
        broadcast_bytes(*this, *entry, copy, c10::kCPU, modifier);
        std::memcpy(entry->shard, copy + entry->slice_offset(rank), entry->slice_bytes(rank));
      }
    }
    if (!shared) comm->barrier("end_edit: the value is stored");
    mark_fenced();
    move_on(ids);
    refresh_held(ids);
  }
  for (auto* entry : edited) drop_edit(*this, *entry);
}

void StoreState::enter_inference() {
  settle();
  const Unobserved quiet;
  if (service) {
    {
      const std::lock_guard lock(mutex);
      inference = true;  // from here nothing is let go
    }
    std::vector<int> ids;
    for (const auto& entry : entries) {
      if (entry->info.partitioned) ids.push_back(entry->info.id);
    }
    pin_all(ids);
    for (const int id : ids) unpin(*entries[static_cast<std::size_t>(id)], false);
  }
  if (world > 1) comm->barrier("enter inference_mode");
}

void StoreState::leave_inference() {
  {
    const std::lock_guard lock(mutex);
    inference = false;
  }
  if (hosted) comm->barrier("leave_inference: all ranks stopped reading");
  if (service) release_gathered();
  if (world > 1) comm->barrier("leave inference_mode");
}

}  // namespace unshard::zero
