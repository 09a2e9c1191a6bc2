#include "comm/store_exchange.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/aside.h"
#include "comm/first_line.h"
#include "unshard/core/error.h"

namespace unshard::comm {

namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;
constexpr double kTogether_s = 0.02;  // ranks that come at about the same time are seen at once
constexpr double kSilent_s = 1;       // then the store counts as one that doesn't answer

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// Sleeps that grow from 20 us to 2 ms (10 ms after a second).
class Pause {
 public:
  double seconds() const { return seconds_since(started_); }
  void operator()() {
    std::this_thread::sleep_for(nap_);
    nap_ = std::min(nap_ * 2, seconds() < 1 ? std::chrono::microseconds(2000) : std::chrono::microseconds(10000));
  }

 private:
  const Clock::time_point started_ = Clock::now();
  std::chrono::microseconds nap_{20};
};

}  // namespace

// All but `rank`, `size` and what the mutex guards is the asking thread's.
struct StoreExchange::State {
  State(c10::intrusive_ptr<c10d::Store> its_store, std::string its_prefix, int its_rank, int its_size)
      : store(std::move(its_store)), prefix(std::move(its_prefix)), rank(its_rank), size(its_size), texts(static_cast<std::size_t>(size)) {}

  const c10::intrusive_ptr<c10d::Store> store;
  const std::string prefix;
  const int rank, size;
  std::uint64_t round = 0;
  std::atomic<bool> given_up{false};

  std::mutex mutex;
  Clock::time_point answered;                     ///< when the store last did
  std::vector<std::optional<std::string>> texts;  ///< of this round, by rank
  std::vector<std::string> former;                ///< of the one before

  std::string key(std::uint64_t number, int of) const { return cat("unshard/", prefix, "/", number, "/", of); }
  std::string key(int of) const { return key(round, of); }
  void begin(const std::string& mine);
  void note(int of, const std::vector<std::uint8_t>& bytes);
  bool take_all();
  bool take(int of);
  /// Whether every rank has come; false: given up, or `stop(text)` was true of one.
  bool run(const std::string& mine, const std::function<bool(const std::string&)>& stop);
};

// A rank posts round k + 2 only when it has seen all of round k + 1, which every rank posts after it read round k: older keys can go.
void StoreExchange::State::begin(const std::string& mine) {
  {
    const std::lock_guard lock(mutex);
    former.resize(static_cast<std::size_t>(size));
    for (std::size_t of = 0; of < texts.size(); ++of)
      if (texts[of]) former[of] = std::move(*texts[of]);
    texts.assign(static_cast<std::size_t>(size), std::nullopt);
    answered = Clock::now();
  }
  ++round;
  const std::vector<std::uint8_t> bytes(mine.begin(), mine.end());
  store->set(key(rank), bytes);
  if (round > 2) store->deleteKey(key(round - 2, rank));
  note(rank, bytes);
}

void StoreExchange::State::note(int of, const std::vector<std::uint8_t>& bytes) {
  const std::lock_guard lock(mutex);
  texts[static_cast<std::size_t>(of)] = std::string(bytes.begin(), bytes.end());
}

// One question for all keys, and one for all texts: round trips to a far store don't grow with the number of ranks.
bool StoreExchange::State::take_all() {
  std::vector<std::string> keys;
  for (int of = 0; of < size; ++of) keys.push_back(key(of));
  if (!store->hasExtendedApi() || !store->check(keys)) return false;
  const auto all = store->multiGet(keys);
  for (int of = 0; of < size; ++of) note(of, all[static_cast<std::size_t>(of)]);
  return true;
}

bool StoreExchange::State::take(int of) {
  if (texts[static_cast<std::size_t>(of)]) return true;
  const std::string name = key(of);
  if (!store->check({name})) return false;
  note(of, store->get(name));
  return true;
}

bool StoreExchange::State::run(const std::string& mine, const std::function<bool(const std::string&)>& stop) {
  begin(mine);
  for (Pause pause; !given_up; pause()) {
    bool all = take_all();
    if (!all && pause.seconds() > kTogether_s) {
      all = true;
      for (int of = 0; of < size; ++of) all = take(of) && all;
    }
    for (const auto& text : texts)
      if (text && stop && stop(*text)) return false;
    if (all) return true;
    const std::lock_guard lock(mutex);
    answered = Clock::now();
  }
  return false;
}

StoreExchange::StoreExchange(c10::intrusive_ptr<c10d::Store> store, std::string prefix, int rank, int size, StoreRules rules)
    : rank_(rank),
      size_(size),
      rules_(std::move(rules)),
      state_(std::make_shared<State>(std::move(store), std::move(prefix), rank, size)) {}

// A store that fails is most often one whose server ended because of somebody else; who that is may be known a moment later.
void StoreExchange::say_who_ended(std::string_view place) const {
  for (int attempt = 0; rules_.check && attempt < 20; ++attempt) {
    rules_.check(place);
    std::this_thread::sleep_for(10ms);
  }
}

void StoreExchange::raise_late(std::string_view place, double limit_s, const std::string& call) const {
  state_->given_up = true;
  std::string text;
  bool silent = false;
  {
    const std::lock_guard lock(state_->mutex);
    silent = seconds_since(state_->answered) > kSilent_s;
    for (int rank = 0; rank < size_; ++rank) {
      const auto at = static_cast<std::size_t>(rank);
      const std::string last = at < state_->former.size() ? state_->former[at] : "";
      if (call.empty() && !state_->texts[at]) text += cat(text.empty() ? "" : ", ", "rank ", rank, " hasn't come");
      if (call.empty()) continue;
      text +=
          cat(rank ? ", " : "", "rank ", rank, " is ",
              state_->texts[at] ? cat("in ", call)
                                : cat(silent ? "not heard of" : "elsewhere", " (its last such call: ", last.empty() ? "none" : last, ")"));
    }
  }
  const std::string ranks = rules_.explain ? rules_.explain() : std::string();
  throw CommError(cat(place, " not every rank came within ", limit_s, " s: ", text,
                      silent ? "; rank 0, which serves the store unless the launcher does, is stopped or can't be reached" : "",
                      ranks.empty() ? "" : "; ", ranks, "; this is rank ", rank_, " of ", size_));
}

std::vector<std::string> StoreExchange::all_gather(const std::string& mine, std::string_view where) {
  const std::string place = cat("[comm.", where, "]");
  const auto check = [&](double waited_s) {
    if (rules_.check) rules_.check(place);
    if (waited_s > rules_.timeout.count()) raise_late(place, rules_.timeout.count(), "");
  };
  try {
    aside([state = state_, mine] { return state->run(mine, {}); }, check);
  } catch (const c10::Error& error) {
    say_who_ended(place);
    throw CommError(cat(place, " the store (rank 0's, at MASTER_ADDR:MASTER_PORT) fails on rank ", rank_, ": ", first_line(error.what())));
  }
  std::vector<std::string> all;
  for (const auto& text : state_->texts) all.push_back(*text);
  return all;
}

void StoreExchange::check_all_in(std::string_view call, std::chrono::duration<double> limit) {
  const std::string mine(call), place = cat("[comm.check_all_in] ", call, ":");
  const auto check = [&](double waited_s) {
    if (waited_s > limit.count()) raise_late("[comm.check_all_in]", limit.count(), mine);
    if (rules_.check) rules_.check(place);
  };
  try {
    if (aside([state = state_, mine] { return state->run(mine, [&](const std::string& text) { return text != mine; }); }, check)) return;
  } catch (const c10::Error& error) {
    say_who_ended(place);
    throw CommError(cat(place, " the store fails on rank ", rank_, ": ", first_line(error.what())));
  }
  for (int rank = 0; rank < size_; ++rank)
    if (const auto& theirs = state_->texts[static_cast<std::size_t>(rank)]; theirs && *theirs != call)
      throw CommError(cat("[comm.check_all_in] the ranks are in different calls: rank ", rank_, " is in ", call, ", rank ", rank, " is in ",
                          *theirs, "; every rank must make the same calls in the same order"));
}

}  // namespace unshard::comm
