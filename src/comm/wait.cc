// Waits of HostGroup: spin, then sleep on the group's futex word, looking for ended peers in between.
#include <unistd.h>

#include <algorithm>

#include "comm/failure_text.h"
#include "comm/futex.h"
#include "comm/host_group_internal.h"
#include "unshard/core/error.h"
#include "unshard/core/log.h"

namespace unshard::comm {

namespace {
using Seconds = std::chrono::duration<double>;
using namespace std::chrono_literals;

constexpr auto kShortSleep = 2ms;  // between looks at the peers
constexpr auto kLongSleep = 10ms;  // after kLongAfter: a waiting rank should cost next to nothing
constexpr auto kLongAfter = 200ms;
constexpr auto kInterruptEvery = 50ms;
constexpr auto kOtherCallGrace = 200ms;
constexpr auto kWorkGrace = 1s;  // for a peer's own time-out to be told by it
constexpr auto kGrace = 3s;      // for a wait that can't tell whether it needs a peer that left, or doesn't need one that died

/// One waiter among those that a notifier must wake.
class Sleeper {
 public:
  explicit Sleeper(std::atomic<std::uint32_t>& count) : count_(count) { count_.fetch_add(1, std::memory_order_seq_cst); }
  ~Sleeper() { count_.fetch_sub(1, std::memory_order_seq_cst); }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

 private:
  std::atomic<std::uint32_t>& count_;
};

std::int64_t ns(Seconds seconds) { return static_cast<std::int64_t>(std::min(seconds.count(), 9e9) * 1e9); }
}  // namespace

std::string Place::text() const { return detail.empty() ? cat("[comm.", op, "]") : cat("[comm.", op, " '", detail, "']"); }

// [Note: no lost wake-ups] A waiter counts itself in `sleepers` before it evaluates ready(); a notifier stores its data before it looks at
// `sleepers`. Both are read-modify-writes of one word, so one comes first: either the waiter sees the data or the notifier sees the
// waiter and moves `wake`, on which the waiter's futex call then doesn't sleep. Sleeps are bounded anyway: peers die without notice.
void HostGroupImpl::notify() {
  if (control_->sleepers.fetch_add(0, std::memory_order_seq_cst) == 0) return;
  control_->wake.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(control_->wake);
}

void HostGroupImpl::wait_until(const std::function<bool()>& ready, std::string_view where) {
  check_member("wait_until");
  wait(ready, {"wait", where});
}

void HostGroupImpl::wait_for_work(const std::function<bool()>& ready, const std::function<std::uint64_t()>& progress,
                                  std::string_view where) {
  check_member("wait_for_work");
  wait(ready, {"wait", where}, {{}, {}, progress});
}

bool HostGroupImpl::wait(const std::function<bool()>& ready, const Place& place, const WaitRules& rules) {
  if (ready()) return true;
  const std::int64_t end = monotonic_ns() + spin_.count();
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      cpu_relax();
    }
  } while (monotonic_ns() < end);
  check_not_ended(place);
  publish_waiting(&place);
  struct Unpublish {
    HostGroupImpl& group;
    ~Unpublish() { group.publish_waiting(nullptr); }
  } unpublish{*this};
  try {
    const bool came = wait_asleep(ready, place, rules);
    if (wait_end_hook_) wait_end_hook_();
    return came;
  } catch (const CommError& error) {
    if (options_.on_failure) options_.on_failure(error.what());
    give_up(error.what());
    throw;
  } catch (const std::exception& error) {  // an interrupt
    give_up(cat(error.what(), " in ", place.text()));
    throw;
  } catch (...) {
    give_up(cat("interrupted in ", place.text()));
    throw;
  }
}

// Peers that wait for this rank hear why it ends.
void HostGroupImpl::give_up(const std::string& why) {
  if (failure_hook_) failure_hook_(why);
  fail(failure_to_tell(why));
}

// After its first error a group is out of step. (What is here already can still be used.)
void HostGroupImpl::check_not_ended(const Place& place) const {
  if (ended_.load(std::memory_order_relaxed) && phase_of(rank_) == Phase::failed)
    throw CommError(cat(place.text(), " this group can't be used any more; its first error was: ", mine().failure.get()));
}

bool HostGroupImpl::wait_asleep(const std::function<bool()>& ready, const Place& place, const WaitRules& rules) {
  WaitClock clock(monotonic_ns());
  const Seconds patience = rules.progress ? options_.timeout + kWorkGrace : options_.timeout;
  const std::int64_t limit = ns(rules.give_up ? std::min(*rules.give_up, patience) : patience);
  if (rules.progress) clock.progress = rules.progress();
  for (;;) {
    const bool patient = monotonic_ns() - clock.started > std::chrono::nanoseconds(kLongAfter).count();
    {
      const Sleeper counted(control_->sleepers);
      const std::uint32_t word = control_->wake.load(std::memory_order_acquire);
      if (ready()) return true;
      if (!(control_->departures.load(std::memory_order_acquire) && clock.ended_seen == 0))
        futex_wait(control_->wake, word, patient ? kLongSleep : kShortSleep);
    }
    if (ready()) return true;

    const std::int64_t now = monotonic_ns();
    if (now - clock.looked >= std::chrono::nanoseconds(kShortSleep).count() || control_->departures.load(std::memory_order_acquire)) {
      clock.looked = now;
      look_for_ended_peers(ready, place, rules, clock);
      if (ready()) return true;
    }
    if (now - clock.interrupted >= std::chrono::nanoseconds(kInterruptEvery).count()) {
      clock.interrupted = now;
      if (options_.interrupt_check) options_.interrupt_check();
      look_for_other_calls(ready, place, rules, clock);
      if (wait_hook_) wait_hook_(place, static_cast<double>(now - clock.started) * 1e-9);
      if (!clock.reported && !rules.give_up && options_.report_after.count() > 0 && now - clock.started >= ns(options_.report_after))
        report_stall(place, clock);
    }
    if (rules.progress && rules.progress() != clock.progress) {
      clock.progress = rules.progress();
      clock.moved = now;
    }
    if (now - clock.moved >= limit) {
      if (rules.give_up && *rules.give_up < options_.timeout) return false;
      throw CommError(cat(place.text(), " no progress for ", options_.timeout.count(), " s: ", describe_all(), "; this is ", own_name()));
    }
  }
}

// A peer's last writes precede its end, so ready() is asked once more before its end is called an error.
void HostGroupImpl::look_for_ended_peers(const std::function<bool()>& ready, const Place& place, const WaitRules& rules,
                                         WaitClock& clock) const {
  std::vector<int> dead = watch_.dead();
  for (int peer = 0; peer < size_; ++peer) {
    const Phase phase = phase_of(peer);
    if (const RankBlock* failed = failed_block(peer)) {
      if (ready()) return;
      throw CommError(cat(place.text(), " ", describe_failure(peer, failed->failure.get())));
    }
    const bool left = phase == Phase::gone;
    const bool died = !left && std::find(dead.begin(), dead.end(), peer) != dead.end();
    if (!left && !died) continue;
    if (ready()) return;
    const bool owes = rules.owes ? rules.owes(peer) : died;
    if (!owes) {
      if (clock.ended_seen == 0) clock.ended_seen = monotonic_ns();
      if (left && rules.owes) continue;  // it did its part
      if (monotonic_ns() - clock.ended_seen < std::chrono::nanoseconds(kGrace).count()) continue;
    }
    throw CommError(cat(place.text(), " ", describe_end(peer, left ? departure(block(peer).failure.get()) : "is gone")));
  }
}

/// Number of the last call that a rank announced in check_all_in.
std::uint64_t HostGroupImpl::announced_by(int rank) const {
  const auto& announced = block(rank).announced;
  return std::max(announced[0].sequence.load(std::memory_order_acquire), announced[1].sequence.load(std::memory_order_acquire));
}

// A peer that owes what is waited for here, and has announced a call that this rank hasn't made, waits for this rank there: neither can go
// on. The grace lets a call that has just ended be told from one that is waited in.
void HostGroupImpl::look_for_other_calls(const std::function<bool()>& ready, const Place& place, const WaitRules& rules, WaitClock& clock) {
  if (!rules.owes || rules.give_up) return;  // without: it can't be told who must come; check_all_in itself compares
  const std::uint64_t mine = announced_by(rank_);
  int other = -1;
  for (int peer = 0; peer < size_ && other < 0; ++peer)
    if (peer != rank_ && announced_by(peer) > mine && rules.owes(peer)) other = peer;
  if (other < 0 || ready()) {
    clock.mismatch_seen = 0;
    return;
  }
  if (clock.mismatch_seen == 0) clock.mismatch_seen = monotonic_ns();
  if (monotonic_ns() - clock.mismatch_seen < std::chrono::nanoseconds(kOtherCallGrace).count()) return;
  const std::string call = block(other).announced[announced_by(other) % 2].call.get();
  const std::string text =
      cat("[comm.check_all_in] the ranks are in different calls: rank ", name(rank_), " is in ", last_seen(rank_), ", waiting in ",
          place.text(), ", rank ", name(other), " is in ", call, "; every rank must make the same calls in the same order");
  fail(text);
  throw CommError(text);
}

// One line a host. What the other waiting ranks know is in it.
void HostGroupImpl::report_stall(const Place& place, WaitClock& clock) const {
  clock.reported = true;
  for (int lower = 0; lower < rank_; ++lower)
    if (block(lower).waits.load(std::memory_order_acquire) > 0) return;
  log_warning(name(rank_), cat(place.text(), " no progress for ", options_.report_after.count(), " s, still waiting (until ",
                               options_.timeout.count(), " s): ", describe_all()));
}

void HostGroupImpl::publish_waiting(const Place* place) {
  std::lock_guard<std::mutex> lock(waiting_mutex_);
  if (place) {
    mine().waiting.set(place->text());
    if (mine().waits.load(std::memory_order_relaxed) == 0) mine().waiting_since_ns.store(monotonic_ns(), std::memory_order_relaxed);
    mine().waits.fetch_add(1, std::memory_order_release);
  } else {
    mine().waits.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace unshard::comm
