#include "comm/stall_watch.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "unshard/core/error.h"
#include "unshard/core/log.h"

namespace unshard::comm {

namespace {

using namespace std::chrono_literals;

constexpr double kToldAfter_s = 1;
constexpr auto kEvery = 1s;
constexpr char kNowhere = '-', kWaits = 'W', kCalls = 'C';

/// What a rank says of itself.
struct Where {
  char kind = kNowhere;
  std::int64_t index = -1;
  std::string text;

  std::string pack() const { return cat(kind, ' ', index, ' ', text); }
  static Where parse(const std::string& packed) {
    Where where;
    if (packed.size() < 4 || (packed[0] != kWaits && packed[0] != kCalls)) return where;
    char* end = nullptr;
    where.index = std::strtoll(packed.c_str() + 1, &end, 10);
    where.kind = packed[0];
    where.text = *end == ' ' ? end + 1 : end;
    return where;
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
      state->changed.wait_for(lock, kEvery, [&] { return state->stop || (state->mine.kind == kNowhere && state->told); });
    } else {
      state->changed.wait(lock);
    }
  }
}

StallWatch::StallWatch(c10::intrusive_ptr<c10d::Store> store, int rank, int size, double report_after_s, double timeout_s)
    : rank_(rank), report_after_s_(report_after_s), timeout_s_(timeout_s), state_(std::make_shared<State>()) {
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

void StallWatch::tell(char kind, std::int64_t index, std::string_view text) {
  const std::lock_guard lock(state_->mutex);
  state_->mine = {kind, index, std::string(text)};
  for (auto& where : state_->seen) where = {};
  state_->active = true;
  if (!state_->thread.joinable()) state_->thread = std::thread([state = state_] { State::work(state); });
  state_->changed.notify_all();
}

void StallWatch::announce(std::int64_t index, std::string_view call) { tell(kCalls, index, call); }

void StallWatch::leave() {
  if (!state_->active.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(state_->mutex);
  state_->active = false;
  state_->mine = {};
  state_->changed.notify_all();
  reported_ = false;
}

void StallWatch::waiting(std::int64_t index, std::string_view where, double waited_s) {
  if (waited_s < kToldAfter_s) return;
  if (!state_->active.load(std::memory_order_acquire)) tell(kWaits, index, where);
  std::string other;
  bool lowest = true;
  {
    const std::lock_guard lock(state_->mutex);
    const Where& mine = state_->mine;
    for (int peer = 0; peer < state_->size; ++peer) {
      const Where& its = state_->seen[static_cast<std::size_t>(peer)];
      if (peer < rank_ && its.kind != kNowhere) lowest = false;
      if (its.kind != kNowhere && its.index == mine.index && its.kind != mine.kind && other.empty())
        other = cat("rank ", rank_, " is in ", mine.text, ", rank ", peer, " is in ", its.text);
    }
  }
  if (!other.empty())
    throw CommError(
        cat("[comm.check_all_in] the ranks are in different calls: ", other, "; every rank must make the same calls in the same order"));
  if (reported_ || report_after_s_ <= 0 || waited_s < report_after_s_) return;
  reported_ = true;
  if (!lowest) return;
  log_warning(rank_, cat("[comm] no progress for ", report_after_s_, " s, still waiting (until ", timeout_s_, " s): ", describe_ranks()));
}

std::string StallWatch::describe_ranks() const {
  const std::lock_guard lock(state_->mutex);
  std::string absent, waiting;
  if (state_->mine.kind == kNowhere) return absent;  // this rank hasn't waited long enough to ask
  for (int rank = 0; rank < state_->size; ++rank) {
    const Where& where = rank == rank_ ? state_->mine : state_->seen[static_cast<std::size_t>(rank)];
    auto& text = where.kind == kNowhere ? absent : waiting;
    if (!text.empty()) text += "; ";
    text += cat("rank ", rank, where.kind == kNowhere ? " waits for nobody: it computes, or is stopped" : ": waiting in ", where.text);
  }
  return cat(absent, absent.empty() ? "" : "; ", waiting);  // first who is missing: messages are handed on cut
}

}  // namespace unshard::comm
