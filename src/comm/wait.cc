// Waits of HostGroup: spin, then sleep on the group's futex word, looking for ended peers in between.
#include <unistd.h>

#include <algorithm>

#include "comm/futex.h"
#include "comm/host_group_internal.h"
#include "unshard/core/error.h"

namespace unshard::comm {

namespace {
using Seconds = std::chrono::duration<double>;
using namespace std::chrono_literals;

constexpr auto kShortSleep = 2ms;  // between looks at the peers
constexpr auto kLongSleep = 10ms;  // after kLongAfter: a waiting rank should cost next to nothing
constexpr auto kLongAfter = 200ms;
constexpr auto kInterruptEvery = 50ms;
constexpr auto kGrace = 3s;  // for a wait that can't tell whether it needs a peer that left, or doesn't need one that died

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

bool HostGroupImpl::wait(const std::function<bool()>& ready, const Place& place, const WaitRules& rules) {
  if (ready()) return true;
  const std::int64_t end = monotonic_ns() + spin_.count();
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      cpu_relax();
    }
  } while (monotonic_ns() < end);
  publish_waiting(&place);
  struct Unpublish {
    HostGroupImpl& group;
    ~Unpublish() { group.publish_waiting(nullptr); }
  } unpublish{*this};
  return wait_asleep(ready, place, rules);
}

bool HostGroupImpl::wait_asleep(const std::function<bool()>& ready, const Place& place, const WaitRules& rules) {
  WaitClock clock(monotonic_ns());
  const std::int64_t limit = ns(rules.give_up ? std::min(*rules.give_up, options_.timeout) : options_.timeout);
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
    }
    if (now - clock.started >= limit) {
      if (rules.give_up && *rules.give_up < options_.timeout) return false;
      throw CommError(cat(place.text(), " no progress for ", options_.timeout.count(), " s: ", describe_ranks(), "; this is ", own_name()));
    }
  }
}

// A peer's last writes precede its end, so ready() is asked once more before its end is called an error.
void HostGroupImpl::look_for_ended_peers(const std::function<bool()>& ready, const Place& place, const WaitRules& rules,
                                         WaitClock& clock) const {
  std::vector<int> dead = watch_.dead();
  for (int peer = 0; peer < size_; ++peer) {
    const Phase phase = phase_of(peer);
    if (phase == Phase::failed) {
      if (ready()) return;
      throw CommError(cat(place.text(), " ", describe_end(peer, cat("failed: ", block(peer).failure.get()))));
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
    throw CommError(cat(place.text(), " ", describe_end(peer, left ? "left the group (it ended in good order)" : "is gone")));
  }
}

void HostGroupImpl::publish_waiting(const Place* place) {
  std::lock_guard<std::mutex> lock(waiting_mutex_);
  if (place) {
    mine().waiting.set(place->text());
    mine().waits.fetch_add(1, std::memory_order_release);
  } else {
    mine().waits.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace unshard::comm
