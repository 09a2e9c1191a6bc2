#include "comm/stall_watch.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "unshard/core/error.h"
#include "unshard/core/log.h"

namespace unshard::comm {

namespace {

using namespace std::chrono_literals;

constexpr double kToldAfter_s = 1;
constexpr std::chrono::milliseconds kSoon = 200ms, kEvery = 1s;  // between looks: the first few, the others
constexpr int kSoonLooks = 10;
constexpr auto kExplainFor = 1500ms;
constexpr char kNowhere = '-', kWaits = 'W', kEnd = '\x1f';

/// What a rank says of itself.
struct Where {
  char kind = kNowhere;
  std::int64_t index = -1;
  Doing doing;

  std::string pack() const {
    std::string packed = cat(kind, ' ', index);
    for (const Named& one : {doing.now, doing.before}) packed += cat(kEnd, one.op, kEnd, one.bytes, kEnd, one.text);
    return packed;
  }
  static Where parse(const std::string& packed) {
    Where where;
    std::istringstream words(packed);
    std::string head, bytes;
    std::getline(words, head, kEnd);
    if (head.size() < 3 || head[0] != kWaits) return where;
    where.kind = head[0];
    where.index = std::strtoll(head.c_str() + 2, nullptr, 10);
    for (Named* one : {&where.doing.now, &where.doing.before}) {
      std::getline(words, one->op, kEnd);
      std::getline(words, bytes, kEnd);
      std::getline(words, one->text, kEnd);
      one->bytes = std::strtoll(bytes.c_str(), nullptr, 10);
    }
    return where;
  }
  /// Its collective number `at`, if it is known.
  const Named* number(std::int64_t at) const {
    const Named* one = kind == kNowhere ? nullptr : at == index ? &doing.now : at == index - 1 ? &doing.before : nullptr;
    return one && !one->op.empty() ? one : nullptr;
  }
};

}  // namespace

struct StallWatch::State {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0, size = 1;
  mutable std::mutex mutex;
  std::condition_variable changed;
  Where mine;
  std::vector<Where> seen;  // by rank
  bool told = false;        // the store may have something of this rank's
  bool fresh = false;       // this rank's words, since the thread told them
  int looks = 0;
  bool stop = false, in_store = false;
  std::atomic<bool> active{false};
  std::thread thread;

  std::string key(int of) const { return cat("stall/", of); }
  void talk(std::unique_lock<std::mutex>& lock);
  static void work(const std::shared_ptr<State>& state);
};

void StallWatch::State::talk(std::unique_lock<std::mutex>& lock) {
  const std::string text = mine.pack();
  const bool waits = mine.kind != kNowhere;
  in_store = true;
  fresh = false;
  ++looks;
  lock.unlock();
  std::vector<Where> news(static_cast<std::size_t>(size));
  try {
    store->set(key(rank), std::vector<std::uint8_t>(text.begin(), text.end()));
    for (int peer = 0; waits && peer < size; ++peer) {
      if (peer == rank || !store->check({key(peer)})) continue;
      const auto bytes = store->get(key(peer));
      news[static_cast<std::size_t>(peer)] = Where::parse(std::string(bytes.begin(), bytes.end()));
    }
  } catch (const std::exception&) {  // the store's server is gone: the waits themselves notice that
  }
  lock.lock();
  in_store = false;
  told = waits;
  seen = std::move(news);
}

void StallWatch::State::work(const std::shared_ptr<State>& state) {
  std::unique_lock lock(state->mutex);
  while (!state->stop) {
    if (state->mine.kind != kNowhere || state->told) {
      state->talk(lock);
      state->changed.wait_for(lock, state->looks < kSoonLooks ? kSoon : kEvery,
                              [&] { return state->stop || state->fresh || (state->mine.kind == kNowhere && state->told); });
    } else {
      state->changed.wait(lock);
    }
  }
}

StallWatch::StallWatch(c10::intrusive_ptr<c10d::Store> store, int rank, int size, double report_after_s, double timeout_s,
                       std::shared_ptr<std::atomic<std::int64_t>> last_report)
    : rank_(rank),
      report_after_s_(report_after_s),
      timeout_s_(timeout_s),
      last_report_(std::move(last_report)),
      state_(std::make_shared<State>()) {
  state_->store = std::move(store);
  state_->rank = rank;
  state_->size = size;
  state_->seen.resize(static_cast<std::size_t>(size));
}

StallWatch::~StallWatch() {
  bool busy = false;
  {
    const std::lock_guard lock(state_->mutex);
    state_->stop = true;
    busy = state_->in_store;
  }
  state_->changed.notify_all();
  if (!state_->thread.joinable()) return;
  busy ? state_->thread.detach() : state_->thread.join();
}

void StallWatch::tell(std::int64_t index, Doing doing) {
  const std::lock_guard lock(state_->mutex);
  state_->mine = {kWaits, index, std::move(doing)};
  for (auto& where : state_->seen) where = {};
  state_->active = true;
  state_->fresh = true;
  state_->looks = 0;
  if (!state_->thread.joinable()) state_->thread = std::thread([state = state_] { State::work(state); });
  state_->changed.notify_all();
}

void StallWatch::leave() {
  if (!state_->active.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(state_->mutex);
  state_->active = false;
  state_->mine = {};
  state_->changed.notify_all();
  reported_ = false;
}

std::string StallWatch::other_call(bool sizes) const {
  const Where& mine = state_->mine;
  for (int peer = 0; peer < state_->size; ++peer) {
    const Where& its = state_->seen[static_cast<std::size_t>(peer)];
    for (const std::int64_t number : {mine.index - 1, mine.index}) {
      if (number < 0) continue;  // of a send or recv
      const Named *here = mine.number(number), *there = its.number(number);
      if (!here || !there) continue;
      const bool resized = sizes && here->bytes != there->bytes;
      if (here->op == there->op && !resized) continue;
      const auto in = [&](const Where& where, const Named& call) {
        return cat(where.index == number ? " is in " : " was in ", call.text, resized ? cat(" (", call.bytes, " bytes)") : "");
      };
      return cat("the ranks are in different calls: rank ", rank_, in(mine, *here), ", rank ", peer, in(its, *there),
                 "; every rank must make the same calls in the same order");
    }
  }
  return {};
}

void StallWatch::wait(std::int64_t index, const Doing& doing, double waited_s, int peer) {
  if (waited_s < kToldAfter_s) return;
  if (!state_->active.load(std::memory_order_acquire)) tell(index, doing);
  std::string other;
  bool lowest = true;
  {
    const std::lock_guard lock(state_->mutex);
    other = other_call(false);
    for (int peer = 0; peer < rank_; ++peer)
      if (state_->seen[static_cast<std::size_t>(peer)].kind != kNowhere) lowest = false;
  }
  if (!other.empty()) throw CommError(cat("[comm.check_all_in] ", other));
  if (reported_ || report_after_s_ <= 0 || waited_s < report_after_s_) return;
  reported_ = true;
  if (!lowest || !is_first_report()) return;
  log_warning(rank_,
              cat("[comm] no progress for ", report_after_s_, " s, still waiting (until ", timeout_s_, " s): ", describe_ranks(peer)));
}

bool StallWatch::is_first_report() const {
  if (!last_report_) return true;
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  const auto now_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  auto last = last_report_->load();
  if (last > 0 && static_cast<double>(now_ns - last) < report_after_s_ * 1e9) return false;
  return last_report_->compare_exchange_strong(last, now_ns);
}

// Who fails at once may be ahead of others, which tell where they are after a second of waiting.
std::string StallWatch::explain(std::int64_t index, const Doing& doing) {
  if (!state_->active.load(std::memory_order_acquire)) tell(index, doing);
  const auto limit = std::chrono::steady_clock::now() + kExplainFor;
  for (;;) {
    {
      const std::lock_guard lock(state_->mutex);
      if (auto other = other_call(true); !other.empty()) return other;
      const auto unknown =
          std::count_if(state_->seen.begin(), state_->seen.end(), [](const Where& where) { return where.kind == kNowhere; });
      if (unknown <= 1) break;  // this rank's own
    }
    if (std::chrono::steady_clock::now() > limit) break;
    std::this_thread::sleep_for(20ms);
  }
  return describe_ranks();
}

std::string StallWatch::explain_pair(int peer, const Named& pair) {
  if (!state_->active.load(std::memory_order_acquire)) tell(kPair, {pair, {}});
  const auto limit = std::chrono::steady_clock::now() + kExplainFor;
  while (!is_told(peer) && std::chrono::steady_clock::now() < limit) std::this_thread::sleep_for(20ms);
  return describe_ranks(peer);
}

bool StallWatch::is_told(int peer) const {
  const std::lock_guard lock(state_->mutex);
  return state_->seen[static_cast<std::size_t>(peer)].kind != kNowhere;
}

std::string StallWatch::describe(int rank, const std::string& said, bool& waits) const {
  if (describe_ && rank != rank_) return describe_(rank, said, waits);
  waits = !said.empty();
  return cat("rank ", rank, waits ? cat(": ", said) : " waits for nobody, as far as is known: it computes, or is stopped");
}

std::string StallWatch::describe_ranks(int peer) const {
  std::vector<Where> all;
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->mine.kind == kNowhere) return {};  // this rank hasn't waited long enough to ask
    all = state_->seen;
    all[static_cast<std::size_t>(rank_)] = state_->mine;
  }
  std::string absent, waiting;
  for (int rank = 0; rank < state_->size; ++rank) {
    const Where& where = all[static_cast<std::size_t>(rank)];
    const bool spoke = where.kind != kNowhere;
    if (!spoke && peer >= 0 && rank != peer) continue;
    bool waits = spoke;
    const std::string one = describe(rank, spoke ? cat("waiting in ", where.doing.now.text) : std::string(), waits);
    auto& text = waits ? waiting : absent;
    text += cat(text.empty() ? "" : "; ", one);
  }
  return cat(absent, absent.empty() || waiting.empty() ? "" : "; ", waiting);  // first who is missing: messages are handed on cut
}

}  // namespace unshard::comm
