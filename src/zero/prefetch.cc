// Private shards: fetching ahead along the trace, on a thread of its own.
#include <optional>

#include "zero/gather_span.h"
#include "zero/raw_tensor.h"
#include "zero/state.h"

namespace unshard::zero {
namespace {

// A failed prefetch is silent unless a touch waits for it, which has its error then; one that comes later fetches for itself and reports.
void fetch_batch(StoreState& state, const std::vector<Entry*>& batch) {
  std::vector<at::DataPtr> copies;
  std::vector<std::byte*> to;
  std::optional<CommError> failure;
  bool arrived = true;
  const GatherSpan span(state.comm->timeline(), Lane::prefetch, "fetch ahead", batch);
  try {
    for (const auto* entry : batch) to.push_back(static_cast<std::byte*>(copies.emplace_back(state.allocate(*entry)).get()));
    state.load_whole(batch, to);
  } catch (const CommError& error) {
    failure = error;
  } catch (const std::exception&) {
    arrived = false;
  }
  const std::lock_guard lock(state.mutex);
  if (failure) state.fail_fills(batch, *failure);
  for (std::size_t i = 0; i < batch.size() && !failure; ++i) {
    if (arrived) {
      ++state.gathers;
      if (state.install_copy(*batch[i], std::move(copies[i]), Residence::gathered)) ++state.prefetched;
    } else {
      state.fail_fill(*batch[i]);
    }
  }
  state.prefetching -= static_cast<int>(batch.size());
  state.filled.notify_all();
}

void run_prefetch(StoreState& state) {
  const Unobserved quiet;
  for (;;) {
    std::vector<Entry*> batch;
    {
      std::unique_lock lock(state.mutex);
      state.fetch_wanted.wait(lock, [&] { return state.stopping || !state.prefetch_queue.empty(); });
      if (state.prefetch_queue.empty()) return;
      for (const int id : state.prefetch_queue) batch.push_back(state.entries[static_cast<std::size_t>(id)].get());
      state.prefetch_queue.clear();
    }
    fetch_batch(state, batch);
  }
}

}  // namespace

void StoreState::follow_trace(Entry& entry) {
  if (inference) return;
  note_mode(entry.info.id);
  if (entry.info.id == last_touched) return;
  last_touched = entry.info.id;
  const auto advice = trace().touch(entry.info.id, live, live_numel);
  if (lockstep.load(std::memory_order_relaxed)) return;  // peers may be writing
  bool wanted = false;
  for (const int id : advice.fetch) {
    Entry& ahead = *entries[static_cast<std::size_t>(id)];
    if (!ahead.info.partitioned || ahead.residence != Residence::at_rest || ahead.home) continue;
    begin_fill(ahead);
    prefetch_queue.push_back(id);
    ++prefetching;
    wanted = true;
  }
  if (!wanted) return;
  if (prefetch_threads.empty()) prefetch_threads.emplace_back([this] { run_prefetch(*this); });
  fetch_wanted.notify_one();
}

void StoreState::drain_prefetch() {
  std::unique_lock lock(mutex);
  ahead_on = false;  // until a touch, or a new step
  filled.wait(lock, [this] { return prefetching == 0; });
}

void StoreState::stop_prefetch() {
  {
    const std::lock_guard lock(mutex);
    stopping = true;
    fetch_wanted.notify_all();
  }
  for (auto& thread : prefetch_threads) thread.join();
  prefetch_threads.clear();
}

}  // namespace unshard::zero
