// Several hosts: following the plan. What it foresees is fetched ahead of the touches, by threads of all ranks of the host together.
#include <algorithm>
#include <chrono>

#include "zero/gather_span.h"
#include "zero/gathered_count.h"
#include "zero/raw_tensor.h"
#include "zero/state.h"

namespace unshard::zero {
namespace {

// A gather of the plan: what of it isn't here is claimed, with room, else it is put off. Lock held.
std::vector<Entry*> claim_next_gather(StoreState& state) {
  std::vector<Entry*> claimed;
  auto& copy = *state.host_copy;
  while (claimed.empty()) {
    auto& follower = state.follower();
    const auto index = follower.take();
    if (!index) return {};
    const auto& gather = follower.plan().gathers[*index];
    const auto positions = follower.positions();
    for (const int id : gather.ids) {
      Entry& entry = *state.entries[static_cast<std::size_t>(id)];
      if (entry.elsewhere_numel == 0 || entry.unfenced.load()) continue;
      Presence before{};
      bool spared = false;
      if (!copy.claim(id, entry.epoch.load(), &before)) continue;
      std::int64_t needed = INT64_MAX;
      for (const auto position : positions) needed = std::min(needed, state.trace().distance_from(position, id));
      if (before == Presence::stale ||
          state.make_host_room(entry.elsewhere_numel, entry.elsewhere_bytes(), state.options.max_live_numel, needed, &spared)) {
        claimed.push_back(&entry);
        count_gathered(state);
        continue;
      }
      copy.give_back(id, before);
      state.no_room = true;
      follower.put_back(*index);
      return claimed;
    }
  }
  return claimed;
}

void run_fetch_ahead(StoreState& state) {
  const Unobserved quiet;
  auto& copy = *state.host_copy;
  std::unique_lock lock(state.mutex);
  for (;;) {
    state.fetch_wanted.wait(lock, [&] {
      if (state.stopping) return true;
      return state.ahead_on && !state.no_room && copy.progress_waiters().load() == 0 && state.follower().has_work();
    });
    if (state.stopping) return;
    copy.fetching_ahead().fetch_add(1);  // before room is taken: a touch that finds none knows whom to wait for
    ++state.prefetching;
    const auto claimed = claim_next_gather(state);
    if (!claimed.empty() && state.follower().has_work()) state.fetch_wanted.notify_one();
    lock.unlock();
    bool arrived = !claimed.empty();
    try {
      const GatherSpan span(state.comm->timeline(), Lane::prefetch, "fetch ahead", claimed);
      if (arrived) state.pull(claimed, /*held=*/false);
    } catch (const std::exception&) {
      arrived = false;  // a touch that waits for it has the same error by now; one that comes later fetches it itself and reports
    }
    copy.fetching_ahead().fetch_sub(1);
    copy.ended_ahead().fetch_add(1);
    copy.notify();
    lock.lock();
    if (arrived)
      state.prefetched += static_cast<std::int64_t>(claimed.size());
    else
      state.no_room = true;  // nothing to do until a touch says so
    --state.prefetching;
    state.filled.notify_all();
  }
}

}  // namespace

void StoreState::wake_fetch_ahead() {
  ahead_on = true;
  no_room = false;
  if (lockstep.load(std::memory_order_relaxed) || inference || !follower().has_work()) return;
  if (prefetch_threads.empty()) {
    // One request is under way a thread; with two the link doesn't idle between an answer and the next request.
    const int count = host_copy->local_ranks() == 1 ? 2 : 1;
    for (int i = 0; i < count; ++i) prefetch_threads.emplace_back([this] { run_fetch_ahead(*this); });
  }
  fetch_wanted.notify_one();
}

// What the plan lets go after this use has gone once the host's last rank has passed it.
static void let_go_as_planned(StoreState& state, int id) {
  const auto& plan = state.follower().plan();
  Entry& entry = *state.entries[static_cast<std::size_t>(id)];
  if (plan.keeps_all || entry.elsewhere_numel == 0 || state.host_copy->users(id) > 0) return;
  const auto positions = state.follower().positions();
  const auto use = state.trace().last_use_before(state.trace().position(), id);
  const bool passed = use < *std::min_element(positions.begin(), positions.end());
  if (passed && use < plan.release_after.size() && plan.release_after[use]) state.let_memory_go(entry);
}

void StoreState::follow_plan(Entry& entry) {
  const int id = entry.info.id;
  if (inference) return;
  note_mode(id);
  if (id == last_touched) return;
  const int before = std::exchange(last_touched, id);
  const auto now = std::chrono::steady_clock::now();
  if (before >= 0) longest_now = std::max<std::chrono::nanoseconds>(longest_now, now - touched_at);
  longest_pause = std::max(longest_pause, longest_now);
  touched_at = now;
  const bool expected = trace().advance(id);
  follower().moved(trace().position());
  if (host_copy->progress_waiters().load() > 0) host_copy->notify();
  if (before >= 0) let_go_as_planned(*this, before);
  if (!expected && follower().agreed() && !trace().followed().empty()) {
    outside_plan.fetch_add(1, std::memory_order_relaxed);
    if (mode == Mode::train && divergence.touches++ == 0) divergence.first = id;
  }
  wake_fetch_ahead();
}

}  // namespace unshard::zero
