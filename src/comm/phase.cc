// What ranks publish about themselves, and the texts made of it.
#include <algorithm>
#include <fstream>
#include <iomanip>
#include <string>

#include "comm/failure_text.h"
#include "comm/futex.h"
#include "comm/host_group_internal.h"
#include "unshard/core/error.h"

namespace unshard {

const char* phase_name(Phase phase) {
  switch (phase) {
    case Phase::starting:
      return "starting";
    case Phase::idle:
      return "idle";
    case Phase::forward:
      return "forward";
    case Phase::backward:
      return "backward";
    case Phase::blocked:
      return "blocked";
    case Phase::reducing:
      return "reducing";
    case Phase::updating:
      return "updating";
    case Phase::publishing:
      return "publishing";
    case Phase::collective:
      return "collective";
    case Phase::failed:
      return "failed";
    case Phase::gone:
      return "gone";
  }
  return "unknown";
}

namespace comm {

void HostGroupImpl::set_phase(Phase phase, std::int64_t step, std::string_view detail) {
  check_member("set_phase");
  if (ended_.load(std::memory_order_relaxed)) return;
  RankBlock& me = mine();
  me.detail.set(detail.substr(0, 100));
  me.step.store(step, std::memory_order_relaxed);
  me.since_ns.store(monotonic_ns(), std::memory_order_relaxed);
  me.phase.store(static_cast<std::int32_t>(phase), std::memory_order_release);
}

Phase HostGroupImpl::phase_of(int rank) const { return static_cast<Phase>(block(rank).phase.load(std::memory_order_acquire)); }

void HostGroupImpl::leave(Phase phase) {
  if (ended_.exchange(true)) return;
  RankBlock& me = mine();
  me.left_from.store(me.phase.load(std::memory_order_relaxed), std::memory_order_relaxed);
  me.phase.store(static_cast<std::int32_t>(phase), std::memory_order_release);
  control_->departures.fetch_add(1, std::memory_order_seq_cst);
  control_->wake.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(control_->wake);
}

void HostGroupImpl::fail(std::string_view reason) {
  check_member("fail");
  if (ended_.load()) return;
  mine().failure.set(reason);
  leave(Phase::failed);
}

HostGroupImpl::Status HostGroupImpl::status() const {
  const RankBlock &me = mine(), &said = shown(rank_);
  const auto seconds_since = [](const std::atomic<std::int64_t>& ns) {
    return static_cast<double>(monotonic_ns() - ns.load(std::memory_order_relaxed)) * 1e-9;
  };
  Status status;
  const Phase own = phase_of(rank_);
  status.phase = own == Phase::failed || own == Phase::gone ? own : static_cast<Phase>(said.phase.load(std::memory_order_acquire));
  status.step = said.step.load(std::memory_order_relaxed);
  status.detail = said.detail.get();
  status.phase_for_s = seconds_since(said.since_ns);
  if (me.waits.load(std::memory_order_acquire) > 0) {
    status.waiting = me.waiting.get();
    status.waiting_for_s = seconds_since(me.waiting_since_ns);
  }
  return status;
}

const RankBlock* HostGroupImpl::family_block(int rank) const {
  if (!family_) return nullptr;
  return &reinterpret_cast<const ControlBlock*>(family_->data())->ranks[family_ranks_[static_cast<std::size_t>(rank)]];
}

const RankBlock& HostGroupImpl::shown(int rank) const {
  const RankBlock& here = block(rank);
  const RankBlock* family = family_block(rank);
  const Phase phase = phase_of(rank);
  const Phase said =
      phase == Phase::failed || phase == Phase::gone ? static_cast<Phase>(here.left_from.load(std::memory_order_relaxed)) : phase;
  return family && said == Phase::starting ? *family : here;
}

const RankBlock* HostGroupImpl::failed_block(int rank) const {
  for (const RankBlock* one : {static_cast<const RankBlock*>(&block(rank)), family_block(rank)})
    if (one && one->phase.load(std::memory_order_acquire) == static_cast<std::int32_t>(Phase::failed)) return one;
  return nullptr;
}

std::string HostGroupImpl::ended_peer() const {
  for (const int peer : watch_.dead())
    if (phase_of(peer) != Phase::gone && !failed_block(peer)) return cat("rank ", name(peer), " is gone (its process on this host ended)");
  for (int peer = 0; peer < size_; ++peer)
    if (const RankBlock* failed = peer == rank_ ? nullptr : failed_block(peer))
      return failure_told_by(name(peer), failed->failure.get(), name(rank_));
  return {};
}

std::string HostGroupImpl::last_seen(int rank) const {
  const RankBlock& peer = shown(rank);
  const Phase now = static_cast<Phase>(peer.phase.load(std::memory_order_acquire));
  const bool ended = now == Phase::failed || now == Phase::gone;
  const Phase phase = ended ? static_cast<Phase>(peer.left_from.load(std::memory_order_relaxed)) : now;
  const std::string detail = peer.detail.get();
  std::string text = cat(phase_name(phase), " of step ", peer.step.load(std::memory_order_relaxed));
  if (!detail.empty()) text += cat(" at '", detail, "'");
  return text;
}

std::string HostGroupImpl::describe_end(int rank, std::string_view what) const {
  const int pid = block(rank).pid.load(std::memory_order_relaxed);
  return cat("rank ", name(rank), " (pid ", pid, ") ", what, ", last seen in ", last_seen(rank), "; this is ", own_name(), " in ",
             last_seen(rank_));
}

std::string HostGroupImpl::describe_failure(int rank, const std::string& told) const {
  if (!is_handed_on(told) || origin_of(told).rank == name(rank_)) return describe_end(rank, cat("failed: ", told));
  return cat(told, "; this is ", own_name(), " in ", last_seen(rank_));
}

std::string HostGroupImpl::own_name() const { return cat("rank ", name(rank_), " of ", names_.ranks.empty() ? size_ : names_.world_size); }

namespace {

/// A process of this host that a signal or a debugger has stopped.
bool is_stopped(int pid) {
  std::string stat;
  std::getline(std::ifstream(cat("/proc/", pid, "/stat")), stat);
  const auto name_end = stat.rfind(") ");
  return name_end != std::string::npos && name_end + 2 < stat.size() && (stat[name_end + 2] == 'T' || stat[name_end + 2] == 't');
}

}  // namespace

std::string HostGroupImpl::describe_stopped(int rank) const {
  const int pid = block(rank).pid.load(std::memory_order_relaxed);
  if (rank == rank_ || !is_stopped(pid)) return {};
  return cat("rank ", name(rank), " (pid ", pid, ") is stopped, by a signal or a debugger, in ", last_seen(rank));
}

bool HostGroupImpl::is_waiting(int rank) const {
  return block(rank).waits.load(std::memory_order_acquire) > 0 || !block(rank).elsewhere.get().empty();
}

std::string HostGroupImpl::describe(int rank) const {
  const RankBlock& peer = shown(rank);
  const Phase phase = phase_of(rank);
  if (auto stopped = describe_stopped(rank); !stopped.empty()) return stopped;
  std::string text = cat("rank ", name(rank), ": ");
  if (phase == Phase::failed) {
    const std::string told = block(rank).failure.get();  // what was handed on is told by the rank where it began
    const int origin = origin_of(told).rank;
    return text + cat("failed (", origin >= 0 ? cat("because of rank ", origin) : told, ") in ", last_seen(rank));
  }
  if (phase == Phase::gone) return text + cat(departure(block(rank).failure.get()), ", last seen in ", last_seen(rank));
  const double seconds = static_cast<double>(monotonic_ns() - peer.since_ns.load(std::memory_order_relaxed)) * 1e-9;
  text +=
      cat(phase_name(static_cast<Phase>(peer.phase.load(std::memory_order_acquire))), ", step ", peer.step.load(std::memory_order_relaxed));
  const std::string detail = peer.detail.get(), elsewhere = block(rank).elsewhere.get();
  if (!detail.empty()) text += cat(", at '", detail, "'");
  if (block(rank).waits.load(std::memory_order_acquire) > 0)
    text += cat(", waiting in ", block(rank).waiting.get());
  else if (!elsewhere.empty())
    text += cat(", ", elsewhere);
  return text + cat(" (", std::fixed, std::setprecision(1), seconds, " s)");
}

// First who ended or is stopped, then who waits for nobody, then who waits: messages are handed on cut.
std::string HostGroupImpl::describe_ranks() const {
  const std::vector<int> dead = watch_.dead();
  std::string lost, busy, elsewhere, waiting;
  const auto add = [](std::string& text, const std::string& one) { text += cat(text.empty() ? "" : "; ", one); };
  for (int rank = 0; rank < size_; ++rank) {
    const Phase phase = phase_of(rank);
    const bool died = phase != Phase::gone && std::find(dead.begin(), dead.end(), rank) != dead.end();
    if (died)
      add(lost, cat("rank ", name(rank), ": gone (pid ", block(rank).pid.load(), " died), last seen in ", last_seen(rank)));
    else if (phase == Phase::failed || phase == Phase::gone)
      add(lost, describe(rank));
    else if (const auto stopped = describe_stopped(rank); !stopped.empty())
      add(lost, stopped);
    else
      add(block(rank).waits.load(std::memory_order_acquire) > 0 ? waiting : is_waiting(rank) ? elsewhere : busy, describe(rank));
  }
  for (const auto& more : {busy, elsewhere, waiting})
    if (!more.empty()) add(lost, more);
  return lost;
}

std::string HostGroupImpl::describe_all() const { return describe_all_ ? describe_all_(describe_ranks()) : describe_ranks(); }

}  // namespace comm
}  // namespace unshard
