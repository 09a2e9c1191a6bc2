// What a communicator tells about itself, to records and to ranks that wait.
#include <thread>

#include "comm/communicator_impl.h"
#include "comm/futex.h"
#include "unshard/core/error.h"

namespace unshard::comm {

void CommunicatorImpl::set_phase(Phase phase, std::string_view detail) {
  if (local_)
    local_->set_phase(phase, step(), detail);
  else
    recorder_.set_phase(phase_name(phase), detail);
}

// Reads only what is final after construction, or guarded: it may run on another thread at any time.
GroupRecord CommunicatorImpl::describe() {
  GroupRecord record;
  record.name = name_;
  record.ranks = run_ranks_;
  record.hosts = map_.host;
  record.transport = size_ == 1             ? "alone"
                     : host_                ? "shared memory"
                     : map_.hosts() < size_ ? "shared memory inside hosts, c10d between them"
                                            : "c10d";
  record.step = step();
  record.entries = recorder_.snapshot();
  if (local_) {
    const auto status = local_->status();
    record.phase = phase_name(status.phase);
    record.detail = status.detail;
    record.phase_for_s = status.phase_for_s;
    record.waiting = status.waiting;
    record.waiting_for_s = status.waiting_for_s;
    record.peers = local_->describe_ranks();
  } else {
    const auto phase = recorder_.phase();
    record.phase = phase.name;
    record.detail = phase.detail;
    record.phase_for_s = phase.for_s;
    if (stall_) record.peers = stall_->describe_ranks();
  }
  // Outside shared memory a rank waits in its running collective.
  if (record.waiting.empty() && !record.entries.empty() && record.entries.back().ended_s < 0) {
    const auto& last = record.entries.back();
    record.waiting = Place{last.op, last.detail}.text();
    record.waiting_for_s = static_cast<double>(monotonic_ns()) * 1e-9 - last.started_s;
  }
  const std::lock_guard lock(counts_mutex_);
  for (const auto& [op, count] : counts_) record.counts[op] = {count.calls, count.bytes};
  return record;
}

Named CommunicatorImpl::performing_call() const {
  const auto& [op, detail, bytes] = performing_call_;
  const std::string text = op == "check_all_in" ? std::string(detail) : cat("step ", step(), ", ", Place{op, detail}.text());
  return {std::string(op), op == "broadcast" ? 0 : bytes, text};  // what a root sends isn't what the others do
}

Doing CommunicatorImpl::doing() const { return {performing_call(), former_call_}; }

bool CommunicatorImpl::is_performing() const { return performing_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }

namespace {

constexpr std::string_view kOtherGroup = " of another group, ";

/// The group that a sub-group is of: "world 0" of "world 0 / gradients 1".
std::string_view root_of(std::string_view name) { return name.substr(0, name.find(" / ")); }

}  // namespace

void CommunicatorImpl::tell_wait(const std::string& place) {
  if (told_wait_.exchange(true)) return;
  if (options_.record)
    options_.record->waits(record_id_, name_, place);
  else
    hear_wait(name_, place);
}

void CommunicatorImpl::end_wait() {
  if (!told_wait_.load(std::memory_order_relaxed) || !told_wait_.exchange(false)) return;
  if (options_.record)
    options_.record->waits(record_id_, name_, {});
  else
    hear_wait(name_, {});
}

void CommunicatorImpl::hear_wait(std::string_view group, std::string_view place) {
  std::string text;
  if (!place.empty()) text = cat("waiting in ", place);
  if (!place.empty() && root_of(group) != root_of(name_)) text += cat(kOtherGroup, "'", group, "'");
  if (local_) local_->set_elsewhere(text);
  if (health_ && root_of(name_) == name_) health_->say(text);  // a sub-group's connections are its parent's
}

std::string CommunicatorImpl::describe_rank(int rank, const std::string& said, bool& waits) const {
  const auto at = static_cast<std::size_t>(rank);
  if (local_ && map_.host[at] == map_.host[static_cast<std::size_t>(rank_)]) {
    const int here = map_.local[at];
    waits = local_->is_waiting(here);
    return said.empty() ? local_->describe(here) : cat("rank ", rank, ": ", said);
  }
  waits = !said.empty();
  if (!health_) return cat("rank ", rank, waits ? cat(": ", said) : " waits for nobody, as far as is known: it computes, or is stopped");
  bool elsewhere = false;
  const std::string known = health_->describe(numbers_[at], rank, elsewhere);
  const bool silent = known.rfind("no word", 0) == 0;
  if (waits && !silent) return cat("rank ", rank, ": ", said);
  waits = elsewhere;
  return known;
}

std::string CommunicatorImpl::describe_remote() const {
  std::string absent, waiting;
  for (int rank = 0; rank < size_ && spans_hosts(); ++rank) {
    if (map_.host[static_cast<std::size_t>(rank)] == map_.host[static_cast<std::size_t>(rank_)]) continue;
    bool waits = false;
    const std::string one = describe_rank(rank, {}, waits);
    auto& text = waits ? waiting : absent;
    text += cat(text.empty() ? "" : "; ", one);
  }
  return cat(absent, absent.empty() || waiting.empty() ? "" : "; ", waiting);
}

std::string CommunicatorImpl::with_advice(std::string ranks) const {
  if (ranks.find(kOtherGroup) == std::string::npos) return ranks;
  // First, because what is handed on to others is cut at some length.
  return cat("ranks wait for each other in different groups (this is '", root_of(name_),
             "'): every rank must call its engines in the same order; ", ranks);
}

void CommunicatorImpl::on_waiting(double waited_s) {
  if (waited_s >= 1) tell_wait(is_performing() ? performing_call().text : std::string("a collective"));
  if (stall_ && waited_s >= 1 && is_performing()) stall_->waiting(recorder_.collectives() - 1, doing(), waited_s);
}

void CommunicatorImpl::on_waiting_for(int peer, std::string_view op, std::string_view detail, double waited_s) {
  if (waited_s >= 1) tell_wait(pair_call(op, detail).text);
  if (stall_ && waited_s >= 1) stall_->waiting_for(peer, pair_call(op, detail), waited_s);
}

std::string CommunicatorImpl::explain_pair(const Call& call) {
  if (host_) return with_advice(host_->describe_ranks());
  return stall_ ? with_advice(stall_->explain_pair(call.peer, pair_call(call.op, call.detail))) : std::string();
}

Named CommunicatorImpl::pair_call(std::string_view op, std::string_view detail) const {
  return {std::string(op), 0, cat("step ", step(), ", ", Place{op, detail}.text())};
}

std::string CommunicatorImpl::explain() {
  if (host_) return with_advice(host_->describe_ranks());
  if (!stall_) return {};
  return with_advice(is_performing() ? stall_->explain(recorder_.collectives() - 1, doing()) : stall_->describe_ranks());
}

}  // namespace unshard::comm
