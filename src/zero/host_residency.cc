// Several hosts: a touch makes the parameter present on this host, whichever of its ranks brings it in. See [Note: one copy a host].
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "unshard/core/error.h"
#include "unshard/core/log.h"
#include "zero/gather_span.h"
#include "zero/gathered_count.h"
#include "zero/phase_scope.h"
#include "zero/raw_tensor.h"
#include "zero/state.h"

namespace unshard::zero {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kMessageBytes = 8 << 20;  // parameters that are claimed at once; the rest is left to other ranks meanwhile
constexpr std::chrono::nanoseconds kLeastPatience = std::chrono::milliseconds(20), kMostPatience = std::chrono::seconds(2);

// Pages that lie in other hosts' pieces alone go back to the system. \return whether it took them.
bool punch(const StoreState& state, const Entry& entry) {
  static const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  for (const auto& [first, end] : state.elsewhere) {
    const auto home = reinterpret_cast<std::uintptr_t>(entry.home);
    const auto from = (home + entry.slice_offset(first) + page - 1) / page * page;
    const auto to = (home + entry.slice_offset(end)) / page * page;
    if (from >= to) continue;
    if (::madvise(entry.home + (from - home), to - from, MADV_REMOVE) != 0) return false;
  }
  return true;
}

// What a pass over wanted parameters came to. What it saw when it began says later whether it is worth another look.
struct Pass {
  std::vector<Entry*> claimed, held, later;
  bool no_room = false, others_fetch = false;
  std::uint32_t failures = 0, failures_of_later = 0;  ///< of any fetch; of later.front()
  std::uint64_t ended_ahead = 0, others_progress = 0;
};

// Takes what is present, claims what is absent up to a message's size, leaves the rest for later. No lock held.
Pass claim_some(StoreState& state, const std::vector<Entry*>& wanted) {
  Pass pass;
  auto& copy = *state.host_copy;
  pass.ended_ahead = copy.ended_ahead().load();
  pass.others_progress = copy.others_progress();
  pass.failures = copy.failures();
  std::int64_t bytes = 0;
  for (auto* entry : wanted) {
    const int id = entry->info.id;
    const auto epoch = entry->epoch.load();
    if (pass.later.empty()) pass.failures_of_later = copy.failures(id);  // asked before it is found busy
    Presence before{};
    if (copy.hold(id, epoch)) {
      pass.held.push_back(entry);
      continue;
    }
    if (pass.no_room || bytes >= kMessageBytes || !copy.claim(id, epoch, &before)) {
      pass.later.push_back(entry);
      continue;
    }
    bool room = before == Presence::stale;
    if (!room) {
      const std::lock_guard lock(state.mutex);
      bool spared = false;
      const auto limit = state.inference ? INT64_MAX : state.options.max_live_numel;
      pass.others_fetch = copy.fetching_ahead().load() > 0;  // asked first: what ends meanwhile can be let go
      room = state.make_host_room(entry->elsewhere_numel, entry->elsewhere_bytes(), limit, -1, state.spares_slower() ? &spared : nullptr);
      if (!room && !spared && !pass.others_fetch) room = copy.take_room(entry->elsewhere_numel, entry->elsewhere_bytes(), INT64_MAX);
      if (room) count_gathered(state);
    }
    if (room) {
      pass.claimed.push_back(entry);
      bytes += entry->elsewhere_bytes();
    } else {
      copy.give_back(id, before);
      pass.no_room = true;
      pass.later.push_back(entry);
    }
  }
  return pass;
}

// [Note: patience] A rank that runs ahead of another one of its host, both in the agreed plan, would throw out what the slower one is about
// to use, and both would fetch it again and again. It waits for the slower one instead, at most a few times as long as touches lie apart:
// that one may be waiting for us in a collective of the user's, or have ended early. When that was in vain nothing is spared until somebody
// moves. Fetches ahead are always waited for: they end by themselves. What has happened since the pass began counts: it may have made room.
void wait_for_room(StoreState& state, const Pass& pass) {
  auto& copy = *state.host_copy;
  auto deadline = Clock::now();
  {
    const std::lock_guard lock(state.mutex);
    deadline += std::clamp(4 * state.longest_pause, kLeastPatience, kMostPatience);
  }
  copy.progress_waiters().fetch_add(1);
  try {
    copy.wait_until(
        [&] {
          if (pass.others_fetch) return copy.ended_ahead().load() != pass.ended_ahead;
          return copy.others_progress() != pass.others_progress || Clock::now() > deadline;
        },
        "room for a parameter of another host", pass.failures);
  } catch (...) {
    copy.progress_waiters().fetch_sub(1);
    throw;
  }
  copy.progress_waiters().fetch_sub(1);
  if (pass.others_fetch) return;
  const std::lock_guard lock(state.mutex);
  if (copy.others_progress() == pass.others_progress) state.impatient_at = pass.others_progress;
}

}  // namespace

void StoreState::set_up_home(Entry& entry) {
  segment->reserve(segment_used);
  if (punch(*this, entry)) return;  // memory was set aside for the whole
  throw CommError(cat("[zero.add] the system doesn't take back shared memory of parameter '", entry.info.name, "' (", std::strerror(errno),
                      "); turn shared memory off here (CommOptions::share_memory)"));
}

void StoreState::pull(const std::vector<Entry*>& claimed, bool held) {
  std::vector<ShardService::Request> requests;
  for (const auto* entry : claimed) {
    const auto shard_bytes = static_cast<std::size_t>(entry->info.layout.shard_numel()) * entry->element_bytes();
    requests.push_back({entry->info.id, entry->home, shard_bytes, entry->whole_bytes()});
  }
  try {
    fetch(requests, claimed);
  } catch (const CommError& error) {
    std::vector<int> ids;
    ids.reserve(claimed.size());
    for (const auto* entry : claimed) ids.push_back(entry->info.id);
    host_copy->fail(ids, error.what());
    throw;
  } catch (...) {  // an interrupt of the caller's own kind: nobody else's error
    for (const auto* entry : claimed) host_copy->give_back(entry->info.id, Presence::stale);
    throw;
  }
  for (const auto* entry : claimed) host_copy->arrived(entry->info.id, held);
  host_copy->notify();
  if (held) {
    for (const auto* entry : claimed) demanded_bytes += entry->elsewhere_bytes();
  }
  const std::lock_guard lock(mutex);
  gathers += static_cast<std::int64_t>(claimed.size());
}

namespace {

// What has changed while it was brought in, and is no longer held: it must be brought in again.
std::vector<Entry*> give_up_outdated(StoreState& state, std::vector<Entry*>& held) {
  const auto current = [&](const Entry* entry) {
    return state.host_copy->presence(entry->info.id, entry->epoch.load()) == Presence::present;
  };
  const auto outdated = std::stable_partition(held.begin(), held.end(), current);
  std::vector<Entry*> again(outdated, held.end());
  held.erase(outdated, held.end());
  state.drop_holds(again);
  return again;
}

}  // namespace

void StoreState::bring_in(const std::vector<Entry*>& wanted) {
  const auto started = Clock::now();
  const GatherSpan span(comm->timeline(), Lane::gather, "wait", wanted);
  std::vector<Entry*> rest = wanted, held;
  try {
    while (!rest.empty()) {
      auto pass = claim_some(*this, rest);
      held.insert(held.end(), pass.held.begin(), pass.held.end());
      if (!pass.claimed.empty()) {
        pull(pass.claimed, /*held=*/true);
        held.insert(held.end(), pass.claimed.begin(), pass.claimed.end());
      } else if (pass.no_room) {
        wait_for_room(*this, pass);
      } else if (!pass.later.empty()) {
        host_copy->wait_while_busy(pass.later.front()->info.id, pass.later.front()->info.name, pass.failures_of_later);
      }
      rest = std::move(pass.later);
      if (rest.empty()) rest = give_up_outdated(*this, held);
    }
  } catch (...) {
    drop_holds(held);
    throw;
  }
  wait_ns += std::chrono::nanoseconds(Clock::now() - started).count();
}

void StoreState::drop_holds(const std::vector<Entry*>& held) noexcept {
  for (const auto* entry : held) host_copy->drop(entry->info.id);
}

bool StoreState::readable_at_home(Entry& entry) {
  if (entry.elsewhere_numel == 0 || entry.held) return true;
  return entry.held = host_copy->hold(entry.info.id, entry.epoch.load());
}

bool StoreState::let_memory_go(Entry& entry) {
  const int id = entry.info.id;
  if (!host_copy->claim_unused(id)) return false;
  punch(*this, entry);  // it did at add()
  host_copy->leave_room(entry.elsewhere_numel, entry.elsewhere_bytes());
  count_gathered(*this);
  host_copy->give_back(id, Presence::absent);
  return true;
}

namespace {

// When any rank of the host that follows the same plan needs it next.
std::int64_t distance_on_host(StoreState& state, const PlanFollower::Positions& positions, int id) {
  std::int64_t nearest = INT64_MAX;
  for (const auto position : positions) nearest = std::min(nearest, state.trace().distance_from(position, id));
  return nearest;
}

}  // namespace

// Unused parameters leave, those needed last first, as long as none is needed within `beyond` elements.
bool StoreState::make_host_room(std::int64_t numel, std::int64_t bytes, std::int64_t limit, std::int64_t beyond, bool* spared) {
  const auto take = [&] { return host_copy->take_room(numel, bytes, limit); };
  if (take()) return true;
  const auto positions = follower().positions();
  const auto [slowest, fastest] = std::minmax_element(positions.begin(), positions.end());
  const auto is_early = [&, slowest = *slowest](std::size_t position, int id) {  // a slower rank has a use of it before it
    const auto last_use = trace().last_use_before(position, id);
    return last_use != SIZE_MAX && last_use >= slowest;
  };
  struct Candidate {
    std::int64_t distance;
    Entry* entry;
    bool early;  ///< for whichever rank: the slower one itself may let go what a faster one had
  };
  std::vector<Candidate> candidates;
  for (const auto& entry : entries) {
    const int id = entry->info.id;
    if (entry->elsewhere_numel == 0 || host_copy->users(id) > 0) continue;
    const auto presence = host_copy->presence(id, entry->epoch.load());
    if (presence == Presence::stale) {
      candidates.push_back({INT64_MAX, entry.get(), false});  // its bytes are of no use
    } else if (presence == Presence::present) {
      const auto distance = distance_on_host(*this, positions, id);
      if (distance <= beyond) continue;
      if (spared && is_early(trace().position(), id)) {
        *spared = true;
        continue;
      }
      candidates.push_back({distance, entry.get(), is_early(*fastest, id)});
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) { return a.distance > b.distance; });
  for (const auto& candidate : candidates) {
    if (!let_memory_go(*candidate.entry)) continue;
    if (candidate.early && follower().agreed()) ++let_go_early;
    if (take()) return true;
  }
  return false;
}

void StoreState::shrink_to_budget() {
  if (inference || host_copy->live_numel() <= options.max_live_numel) return;
  bool spared = false;
  make_host_room(0, 0, options.max_live_numel, -1, spares_slower() ? &spared : nullptr);
}

bool StoreState::spares_slower() {
  return follower().agreed() && host_copy->local_ranks() > 1 && host_copy->others_progress() != impatient_at;
}

void StoreState::refresh_held(const std::vector<int>& ids) {
  if (!host_copy) return;
  for (const int id : ids) {
    Entry& entry = *entries[static_cast<std::size_t>(id)];
    bool held = false;
    {
      const std::lock_guard lock(mutex);
      held = entry.held;
    }
    const auto epoch = entry.epoch.load();
    while (held && host_copy->presence(id, epoch) != Presence::present) {
      const auto failures = host_copy->failures(id);
      Presence before{};
      if (host_copy->claim(id, epoch, &before))
        pull({&entry}, /*held=*/false);
      else
        host_copy->wait_while_busy(id, entry.info.name, failures);
    }
  }
}

}  // namespace unshard::zero
