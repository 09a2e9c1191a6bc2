// A rank's end of a roll call; see roll_call.h.
#include <poll.h>

#include <cstring>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/call_card.h"
#include "comm/frame_socket.h"
#include "comm/roll_state.h"
#include "comm/tcp_socket.h"
#include "unshard/core/error.h"

namespace unshard::comm {

namespace {

using namespace std::chrono_literals;
constexpr auto kCallLimit = 10s;

/// Where rank 0 is; empty when the roll call is over before it has said so.
std::string wait_for_card(RollCall::State& state) {
  for (auto nap = 1ms; !state.is_over(); nap = std::min(nap * 2, 20ms)) {
    if (state.store->check({"roll"})) {
      const auto bytes = state.store->get("roll");
      return std::string(bytes.begin(), bytes.end());
    }
    std::this_thread::sleep_for(nap);
  }
  return {};
}

UniqueFd call_hub(RollCall::State& state, const CallCard& card) {
  UniqueFd fd = start_call(card.address, card.port);
  int error = fd ? ETIMEDOUT : EADDRNOTAVAIL;
  for (const auto limit = RollClock::now() + kCallLimit; fd && RollClock::now() < limit && !state.is_over();) {
    if (!wait_for(fd.get(), POLLOUT, RollClock::now() + 50ms, {})) continue;
    error = call_error(fd.get());
    break;
  }
  if (error == 0) {
    keep_alive(fd.get());
    return fd;
  }
  const std::string trouble =
      cat("rank 0 can't be reached at ", card.address, ":", card.port, ": ", std::strerror(error),
          ". Has it ended? Is there a firewall between the hosts, or does its host's name stand for a loopback address (then set "
          "GLOO_SOCKET_IFNAME to the network interface)?");
  state.tell_trouble(trouble);
  if (state.is_over()) return {};
  const std::string words = cat("rank ", state.rank, " failed: ", trouble);  // rank 0 looks there
  state.store->set("roll trouble", std::vector<std::uint8_t>(words.begin(), words.end()));
  return {};
}

class Member {
 public:
  Member(RollCall::State& state, UniqueFd fd) : state_(state), socket_(std::move(fd)) {}

  void run(const CallCard& card) {
    socket_.send(kGreets, cat(card.cookie, " ", state_.rank));
    while (!socket_.closed()) {
      if (obey()) return hang_up();
      pollfd events[2] = {{socket_.fd(), static_cast<short>(POLLIN | (socket_.has_unsent() ? POLLOUT : 0)), 0},
                          {state_.bell.get(), POLLIN, 0}};
      ::poll(events, 2, static_cast<int>(std::chrono::milliseconds(kRollEvery).count()));
      state_.silence_bell();
      socket_.flush();
      socket_.receive();
      while (const auto frame = socket_.next()) take(*frame);
    }
    state_.tell_ended("rank 0 is gone (its process ended, or its host)");
  }

 private:
  /// Say what there is to say; whether that was the last.
  bool obey() {
    const std::lock_guard lock(state_.mutex);
    const auto now = RollClock::now();
    if (state_.place != told_ || now - spoke_ >= kRollEvery) {
      socket_.send(kAt, state_.place == told_ ? std::string_view() : std::string_view(state_.place));
      told_ = state_.place;
      spoke_ = now;
    }
    if (state_.text) socket_.send(kText, *state_.text);
    state_.text.reset();
    if (!state_.failure.empty())
      socket_.send(kFails, state_.failure);
    else if (state_.leaves)
      socket_.send(kLeaves, "");
    return state_.leaves || state_.stop || !state_.failure.empty();
  }

  void take(const Frame& frame) {
    const std::lock_guard lock(state_.mutex);
    state_.heard = RollClock::now();
    if (frame.kind == kNews) state_.news = frame.text;
    if (frame.kind == kTexts) state_.texts = unpack_texts(frame.text);
    if (frame.kind == kEnded && state_.ended.empty()) state_.ended = frame.text;
    state_.changed.notify_all();
  }

  /// Closed with bytes unread, the socket would drop what it has still to send.
  void hang_up() {
    for (const auto limit = RollClock::now() + 200ms; socket_.has_unsent() && RollClock::now() < limit; socket_.flush())
      std::this_thread::sleep_for(1ms);
    socket_.receive();
  }

  RollCall::State& state_;
  FrameSocket socket_;
  std::string told_;
  RollClock::time_point spoke_{};
};

}  // namespace

void run_roll_member(RollCall::State& state) {
  const std::string text = wait_for_card(state);
  if (text.empty()) return;
  {
    const std::lock_guard lock(state.mutex);
    state.heard = RollClock::now();
  }
  const CallCard card = CallCard::parse(text);
  UniqueFd fd = call_hub(state, card);
  state.set_in_store(false);
  if (fd) Member(state, std::move(fd)).run(card);
}

}  // namespace unshard::comm
