#include "comm/store_exchange.h"

#include <algorithm>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/first_line.h"
#include "unshard/core/error.h"

namespace unshard::comm {

namespace {
using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;
constexpr double kTogether_s = 0.02;

/// Sleeps that grow from 20 us to 2 ms (10 ms after a second), and the check in between.
class Pause {
 public:
  Pause(const StoreRules& rules, std::string place) : rules_(rules), place_(std::move(place)) {}
  double seconds() const { return std::chrono::duration<double>(Clock::now() - started_).count(); }
  void operator()() {
    std::this_thread::sleep_for(nap_);
    nap_ = std::min(nap_ * 2, seconds() < 1 ? std::chrono::microseconds(2000) : std::chrono::microseconds(10000));
    if (rules_.check && Clock::now() - checked_ > 50ms) {
      checked_ = Clock::now();
      rules_.check(place_);
    }
  }

 private:
  const StoreRules& rules_;
  const std::string place_;
  const Clock::time_point started_ = Clock::now();
  Clock::time_point checked_ = started_;
  std::chrono::microseconds nap_{20};
};
}  // namespace

StoreExchange::StoreExchange(c10::intrusive_ptr<c10d::Store> store, std::string prefix, int rank, int size, StoreRules rules)
    : store_(std::move(store)),
      prefix_(std::move(prefix)),
      rank_(rank),
      size_(size),
      rules_(std::move(rules)),
      last_(static_cast<std::size_t>(size)) {}

std::string StoreExchange::key(std::uint64_t round, int rank) const { return cat("unshard/", prefix_, "/", round, "/", rank); }

// A rank posts round k + 2 only when it has seen all of round k + 1, which every rank posts after it read round k: older keys can go.
void StoreExchange::post(const std::string& text) {
  ++round_;
  store_->set(key(round_, rank_), std::vector<std::uint8_t>(text.begin(), text.end()));
  if (round_ > 2) store_->deleteKey(key(round_ - 2, rank_));
}

bool StoreExchange::present(int rank) const { return store_->check({key(round_, rank)}); }

// A store that fails is most often one whose server ended because of somebody else; who that is may be known a moment later.
void StoreExchange::say_who_ended(std::string_view place) const {
  for (int attempt = 0; rules_.check && attempt < 20; ++attempt) {
    rules_.check(place);
    std::this_thread::sleep_for(10ms);
  }
}

// One question for all keys, and one for all texts: round trips to a far store don't grow with the number of ranks.
std::optional<std::vector<std::string>> StoreExchange::fetch_all() const {
  std::vector<std::string> keys;
  for (int rank = 0; rank < size_; ++rank) keys.push_back(key(round_, rank));
  if (!store_->hasExtendedApi() || !store_->check(keys)) return {};
  std::vector<std::string> texts;
  for (const auto& bytes : store_->multiGet(keys)) texts.emplace_back(bytes.begin(), bytes.end());
  return texts;
}

std::string StoreExchange::fetch(int rank) const {
  const auto bytes = store_->get(key(round_, rank));
  return std::string(bytes.begin(), bytes.end());
}

std::vector<std::string> StoreExchange::all_gather(const std::string& mine, std::string_view where) try {
  post(mine);
  std::vector<std::string> all(static_cast<std::size_t>(size_));
  Pause pause(rules_, cat("[comm.", where, "]"));
  for (int rank = 0; rank < size_; ++rank) {
    while (!present(rank)) {
      if (pause.seconds() > rules_.timeout.count())
        throw CommError(cat("[comm.", where, "] rank ", rank, " of ", size_, " didn't come within ", rules_.timeout.count(),
                            " s; this is rank ", rank_, ". Is every rank started, with the same WORLD_SIZE?"));
      pause();
    }
    all[static_cast<std::size_t>(rank)] = fetch(rank);
  }
  return all;
} catch (const c10::Error& error) {
  say_who_ended(cat("[comm.", where, "]"));
  throw CommError(
      cat("[comm.", where, "] the store (rank 0's, at MASTER_ADDR:MASTER_PORT) fails on rank ", rank_, ": ", first_line(error.what())));
}

void StoreExchange::check_all_in(std::string_view call, std::chrono::duration<double> limit) try {
  post(std::string(call));
  std::vector<bool> came(static_cast<std::size_t>(size_), false);
  came[static_cast<std::size_t>(rank_)] = true;
  last_[static_cast<std::size_t>(rank_)] = call;
  Pause pause(rules_, cat("[comm.check_all_in] ", call, ":"));
  for (;;) {
    if (const auto texts = fetch_all(); texts && std::all_of(texts->begin(), texts->end(), [&](const auto& one) { return one == call; })) {
      last_ = *texts;
      return;
    }
    if (pause.seconds() < kTogether_s) {  // all that come at about the same time are seen at once
      pause();
      continue;
    }
    for (int rank = 0; rank < size_; ++rank) {
      if (came[static_cast<std::size_t>(rank)] || !present(rank)) continue;
      came[static_cast<std::size_t>(rank)] = true;
      const std::string theirs = last_[static_cast<std::size_t>(rank)] = fetch(rank);
      if (theirs != call)
        throw CommError(cat("[comm.check_all_in] the ranks are in different calls: rank ", rank_, " is in ", call, ", rank ", rank,
                            " is in ", theirs, "; every rank must make the same calls in the same order"));
    }
    if (std::find(came.begin(), came.end(), false) == came.end()) return;
    if (pause.seconds() > limit.count()) break;
    pause();
  }
  std::string text;
  for (int rank = 0; rank < size_; ++rank) {
    const std::string& last = last_[static_cast<std::size_t>(rank)];
    text += cat(rank ? ", " : "", "rank ", rank, " is ",
                came[static_cast<std::size_t>(rank)] ? cat("in ", call)
                                                     : cat("elsewhere (its last such call: ", last.empty() ? "none" : last, ")"));
  }
  throw CommError(cat("[comm.check_all_in] not every rank came within ", limit.count(), " s: ", text));
} catch (const c10::Error& error) {
  say_who_ended(cat("[comm.check_all_in] ", call, ":"));
  throw CommError(cat("[comm.check_all_in] ", call, ": the store fails on rank ", rank_, ": ", first_line(error.what())));
}

}  // namespace unshard::comm
