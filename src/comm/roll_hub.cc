// Rank 0's end of a roll call, where all others call; see roll_call.h.
#include <poll.h>

#include <algorithm>
#include <cstdlib>
#include <list>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/call_card.h"
#include "comm/frame_socket.h"
#include "comm/own_address.h"
#include "comm/roll_state.h"
#include "comm/tcp_socket.h"
#include "unshard/core/error.h"

namespace unshard::comm {

namespace {

using namespace std::chrono_literals;
constexpr auto kLinger = 1s;       // for what was said last to be read
constexpr auto kStrangers = 5s;    // for a caller to say who it is
constexpr std::size_t kNamed = 8;  // ranks named in one sentence

std::string join(const std::vector<std::string>& parts, std::string_view separator) {
  std::string text;
  for (std::size_t i = 0; i < std::min(parts.size(), kNamed); ++i) text += cat(i ? separator : "", parts[i]);
  if (parts.size() > kNamed) text += cat(" and ", parts.size() - kNamed, " more");
  return text;
}

class Hub {
 public:
  Hub(RollCall::State& state, UniqueFd listener, std::uint64_t cookie)
      : state_(state), listener_(std::move(listener)), cookie_(cookie), members_(static_cast<std::size_t>(state.size)) {
    members_[0].here = true;
  }

  void run() {
    while (!is_done()) {
      sleep();
      obey();
      for (UniqueFd fd = accept_from(listener_.get()); fd; fd = accept_from(listener_.get())) {
        keep_alive(fd.get());
        strangers_.push_back({FrameSocket(std::move(fd)), RollClock::now()});
      }
      greet();
      for (int rank = 1; rank < state_.size; ++rank) listen_to(rank);
      finish_round();
      spread_news();
    }
  }

 private:
  struct Member {
    FrameSocket socket;
    bool here = false, left = false;
    std::string place = "the meeting";
    std::optional<std::string> text;
    RollClock::time_point heard{};
    bool is_connected() const { return here && !left && socket.fd() >= 0 && !socket.closed(); }
  };
  struct Stranger {
    FrameSocket socket;
    RollClock::time_point came;
  };
  Member& member(int rank) { return members_[static_cast<std::size_t>(rank)]; }

  bool is_done() {
    if (!state_.is_over()) return false;
    const auto now = RollClock::now();
    if (over_since_ == RollClock::time_point{}) over_since_ = now;
    if (!said_last_) return false;
    const bool alone = std::none_of(members_.begin(), members_.end(), [](const Member& one) { return one.is_connected(); });
    return alone || now - over_since_ > kLinger;
  }

  void sleep() {
    std::vector<pollfd> events{{listener_.get(), POLLIN, 0}, {state_.bell.get(), POLLIN, 0}};
    for (const auto& stranger : strangers_) events.push_back({stranger.socket.fd(), POLLIN, 0});
    for (const auto& one : members_)
      if (one.is_connected()) events.push_back({one.socket.fd(), static_cast<short>(POLLIN | (one.socket.has_unsent() ? POLLOUT : 0)), 0});
    ::poll(events.data(), events.size(), said_last_ ? 20 : 250);
    state_.silence_bell();
  }

  void to_all(char kind, std::string_view text) {
    for (auto& one : members_)
      if (one.is_connected()) one.socket.send(kind, text);
  }

  /// What rank 0 itself has to say.
  void obey() {
    std::string failure;
    {
      const std::lock_guard lock(state_.mutex);
      member(0).heard = RollClock::now();
      member(0).place = state_.place;
      if (state_.text) member(0).text = std::move(state_.text);
      state_.text.reset();
      if (!state_.failure.empty() && !said_last_) failure = state_.failure;
      said_last_ = state_.leaves || state_.stop || !state_.failure.empty();
    }
    if (!failure.empty() && ended_.empty()) to_all(kEnded, cat("rank 0 failed: ", failure));
    if (said_last_) state_.tell_said();
  }

  void greet() {
    for (auto it = strangers_.begin(); it != strangers_.end();) {
      it->socket.receive();
      const auto frame = it->socket.next();
      if (frame && frame->kind == kGreets) {
        char* end = nullptr;
        const std::uint64_t cookie = std::strtoull(frame->text.c_str(), &end, 10);
        const long rank = std::strtol(end, nullptr, 10);
        if (cookie == cookie_ && rank > 0 && rank < state_.size && !member(static_cast<int>(rank)).here) {
          Member& one = member(static_cast<int>(rank));
          one.socket = std::move(it->socket);
          one.here = true;
          one.heard = RollClock::now();
          news_ = {};  // who has come is news
          if (!ended_.empty()) one.socket.send(kEnded, ended_);
        }
      }
      const bool done = frame || it->socket.closed() || RollClock::now() - it->came > kStrangers;
      it = done ? strangers_.erase(it) : std::next(it);
    }
  }

  void listen_to(int rank) {
    Member& one = member(rank);
    if (!one.is_connected()) return;
    one.socket.flush();
    one.socket.receive();
    while (auto frame = one.socket.next()) {
      one.heard = RollClock::now();
      if (frame->kind == kAt && !frame->text.empty()) one.place = frame->text;
      if (frame->kind == kText) one.text = std::move(frame->text);
      if (frame->kind == kLeaves) one.left = true;
      if (frame->kind == kFails) {
        one.left = true;
        end(cat("rank ", rank, " failed: ", frame->text));
      }
    }
    if (one.socket.closed() && !one.left)
      end(cat("rank ", rank, " is gone (its process ended, or its host), last seen in ", one.place,
              "; its own output or its host's log says why"));
  }

  void end(const std::string& how) {
    if (!ended_.empty()) return;
    ended_ = how;
    to_all(kEnded, ended_);
    state_.tell_ended(ended_);
  }

  void finish_round() {
    if (!std::all_of(members_.begin(), members_.end(), [](const Member& one) { return one.text.has_value(); })) return;
    std::vector<std::string> texts;
    for (auto& one : members_) {
      texts.push_back(std::move(*one.text));
      one.text.reset();
    }
    to_all(kTexts, pack_texts(texts));
    const std::lock_guard lock(state_.mutex);
    state_.texts = std::move(texts);
    state_.changed.notify_all();
  }

  bool all_here() const {
    return std::all_of(members_.begin(), members_.end(), [](const Member& one) { return one.here; });
  }

  /// Who can't reach rank 0 says so in the store.
  void look_for_trouble() {
    state_.set_in_store(true);
    if (state_.store->check({"roll trouble"})) {
      const auto words = state_.store->get("roll trouble");
      end(std::string(words.begin(), words.end()));
    }
    state_.set_in_store(false);
  }

  void spread_news() {
    const auto now = RollClock::now();
    if (now - news_ < kRollEvery) return;
    news_ = now;
    if (!all_here()) look_for_trouble();
    const std::string text = describe(now);
    to_all(kNews, text);
    const std::lock_guard lock(state_.mutex);
    state_.news = text;
  }

  std::string describe(RollClock::time_point now) const {
    std::vector<std::string> absent, silent, behind;
    for (int rank = 0; rank < state_.size; ++rank) {
      const Member& one = members_[static_cast<std::size_t>(rank)];
      const double silent_s = std::chrono::duration<double>(now - one.heard).count();
      if (!one.here)
        absent.push_back(cat("rank ", rank));
      else if (rank > 0 && silent_s > kRollSilent_s)
        silent.push_back(silent_rank(rank, silent_s, one.place));
      else if (!one.text)
        behind.push_back(cat("rank ", rank, " is still in ", one.place));
    }
    std::vector<std::string> parts;
    if (!absent.empty())
      parts.push_back(cat(join(absent, ", "), absent.size() == 1 ? " hasn't" : " haven't",
                          " come (started, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE?)"));
    if (!silent.empty()) parts.push_back(join(silent, "; "));
    if (parts.empty() && !behind.empty()) parts.push_back(join(behind, "; "));
    return join(parts, "; ");
  }

  RollCall::State& state_;
  const UniqueFd listener_;
  const std::uint64_t cookie_;
  std::vector<Member> members_;
  std::list<Stranger> strangers_;
  std::string ended_;
  bool said_last_ = false;
  RollClock::time_point news_{}, over_since_{};
};

}  // namespace

void run_roll_hub(RollCall::State& state) {
  CallCard card = CallCard::at(own_address());
  UniqueFd listener = listen_at(card.address, state.size, card.port);
  if (!listener) {
    state.tell_trouble(cat("no connections can be taken at ", card.address,
                           ", this host's address; set GLOO_SOCKET_IFNAME to the network interface to use"));
    return;
  }
  const std::string text = card.text();
  state.store->set("roll", std::vector<std::uint8_t>(text.begin(), text.end()));
  state.set_in_store(false);
  Hub(state, std::move(listener), card.cookie).run();
}

}  // namespace unshard::comm
