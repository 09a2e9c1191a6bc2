#include "comm/roll_call.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstring>
#include <exception>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/first_line.h"
#include "comm/roll_state.h"
#include "unshard/core/error.h"
#include "unshard/core/log.h"

namespace unshard::comm {

using namespace std::chrono_literals;

RollCall::State::State(c10::intrusive_ptr<c10d::Store> its_store, int its_rank, int its_size)
    : store(std::move(its_store)), rank(its_rank), size(its_size), bell(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

void RollCall::State::ring() const {
  const std::uint64_t one = 1;
  (void)!::write(bell.get(), &one, sizeof(one));
}

void RollCall::State::silence_bell() const {
  std::uint64_t count = 0;
  (void)!::read(bell.get(), &count, sizeof(count));
}

void RollCall::State::tell_ended(std::string_view how) {
  const std::lock_guard lock(mutex);
  if (ended.empty()) ended = how;
  changed.notify_all();
}

void RollCall::State::tell_trouble(std::string_view what) {
  const std::lock_guard lock(mutex);
  if (trouble.empty()) trouble = what;
  changed.notify_all();
}

std::string pack_texts(const std::vector<std::string>& texts) {
  std::string packed;
  for (const auto& text : texts) {
    const std::uint64_t length = text.size();
    packed.append(reinterpret_cast<const char*>(&length), sizeof(length)).append(text);
  }
  return packed;
}

std::vector<std::string> unpack_texts(const std::string& packed) {
  std::vector<std::string> texts;
  for (std::size_t at = 0; at + sizeof(std::uint64_t) <= packed.size();) {
    std::uint64_t length = 0;
    std::memcpy(&length, packed.data() + at, sizeof(length));
    at += sizeof(length);
    texts.push_back(packed.substr(at, length));
    at += length;
  }
  return texts;
}

std::string silent_rank(int rank, double seconds, std::string_view place) {
  return cat("rank ", rank, " gives no sign of life for ", static_cast<int>(seconds * 10) / 10.0, " s, last seen in ", place,
             " (is it stopped, or does its host hang?)");
}

namespace {

void run(const std::shared_ptr<RollCall::State>& state) {
  try {
    state->rank == 0 ? run_roll_hub(*state) : run_roll_member(*state);
  } catch (const std::exception& error) {
    state->tell_trouble(cat("the store fails: ", first_line(error.what()),
                            state->rank == 0 ? "" : "; rank 0, which serves it unless the launcher does, has ended or can't be reached"));
  }
  state->set_in_store(false);
  state->tell_said();
}

}  // namespace

RollCall::RollCall(c10::intrusive_ptr<c10d::Store> store, int rank, int size, RollCallOptions options)
    : rank_(rank),
      size_(size),
      options_(std::move(options)),
      state_(std::make_shared<State>(std::move(store), rank, size)),
      thread_([state = state_] { run(state); }) {}

RollCall::~RollCall() {
  if (!over_) fail("it gave up");
  bool stuck = false;
  {
    const std::lock_guard lock(state_->mutex);
    state_->stop = true;
    stuck = state_->in_store;
  }
  state_->ring();
  stuck ? thread_.detach() : thread_.join();
}

std::string RollCall::prefix() const { return cat("[comm.", options_.place, "] "); }

void RollCall::check() const {
  const std::lock_guard lock(state_->mutex);
  const std::string& what = state_->ended.empty() ? state_->trouble : state_->ended;
  if (!what.empty()) throw RollCallError(cat(prefix(), what, "; this is rank ", rank_, " of ", size_, ", in ", state_->place));
}

std::string RollCall::explain() const {
  for (int attempt = 0; attempt < 60; ++attempt) {
    check();
    std::this_thread::sleep_for(10ms);
  }
  const std::lock_guard lock(state_->mutex);
  const double silent_s = std::chrono::duration<double>(RollClock::now() - state_->heard).count();
  if (rank_ > 0 && state_->in_store) return "rank 0 hasn't come, or its store doesn't answer (is it started? is it stopped?)";
  if (rank_ > 0 && silent_s > kRollSilent_s) return silent_rank(0, silent_s, "the start");
  return state_->news;
}

void RollCall::set_place(std::string_view where) {
  {
    const std::lock_guard lock(state_->mutex);
    state_->place = where;
  }
  state_->ring();
}

std::vector<std::string> RollCall::exchange(const std::string& mine, std::string_view where) {
  set_place(where);
  {
    const std::lock_guard lock(state_->mutex);
    state_->text = mine;
  }
  state_->ring();
  const auto started = RollClock::now();
  const auto limit = started + std::chrono::duration_cast<RollClock::duration>(std::min(options_.timeout, 1e8 * 1s));
  for (;;) {
    {
      std::unique_lock lock(state_->mutex);
      state_->changed.wait_for(lock, 50ms, [&] { return state_->texts || !state_->ended.empty() || !state_->trouble.empty(); });
      if (state_->texts) {
        auto texts = std::move(*state_->texts);
        state_->texts.reset();
        return texts;
      }
    }
    check();
    if (options_.interrupt_check) options_.interrupt_check();
    report(std::chrono::duration<double>(RollClock::now() - started).count());
    if (RollClock::now() < limit) continue;
    throw RollCallError(cat(prefix(), "not every rank came to ", where, " within ", options_.timeout.count(), " s: ", explain(),
                            "; this is rank ", rank_, " of ", size_));
  }
}

// By rank 0, which hears of all. Who waits for rank 0 itself waits in the store, and says so there.
void RollCall::report(double waited_s) {
  if (rank_ > 0 || reported_ || waited_s < options_.report_after.count()) return;
  std::string news;
  {
    const std::lock_guard lock(state_->mutex);
    news = state_->news;
  }
  if (news.empty()) return;
  reported_ = true;
  log_warning(rank_, cat(prefix(), "no progress for ", options_.report_after.count(), " s, still waiting (until ", options_.timeout.count(),
                         " s): ", news));
}

void RollCall::fail(std::string_view why) {
  over_ = true;
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->failure.empty()) state_->failure = why.substr(0, std::min<std::size_t>(why.find('\n'), 1500));
    if (state_->failure.empty()) state_->failure = "it gave up";
  }
  state_->ring();
  std::unique_lock lock(state_->mutex);  // the process may end before the thread is through
  state_->changed.wait_for(lock, 1s, [&] { return state_->said_last || state_->in_store; });
}

void RollCall::finish() {
  exchange("", "the end of the start");
  over_ = true;
  {
    const std::lock_guard lock(state_->mutex);
    state_->leaves = true;
  }
  state_->ring();
}

}  // namespace unshard::comm
