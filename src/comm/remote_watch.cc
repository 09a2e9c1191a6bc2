#include "comm/remote_watch.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <map>

#include "comm/call_card.h"
#include "comm/failure_text.h"
#include "comm/tcp_socket.h"
#include "unshard/core/error.h"

namespace unshard::comm {

namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;
constexpr auto kConnectLimit = 10s;
constexpr std::size_t kLongest = 500;

// The first byte of all, and of what follows: what a rank waits in, up to the end of the line; and last of all that it leaves, or fails.
constexpr char kWelcome = 'W', kSays = 'S', kLeaves = 'L', kFails = 'F', kEnd = '\n';

/// What a connecting rank says first.
struct Greeting {
  std::uint64_t cookie = 0;  ///< the listener's: nobody else is let in
  std::int64_t rank = -1;
};

/// Calls that are under way to several peers at once: one behind a firewall that drops packets holds up no other.
class Calls {
 public:
  Calls(int rank, std::function<void()> check) : rank_(rank), check_(std::move(check)) {}

  void start(int peer, const CallCard& card) {
    if (UniqueFd fd = start_call(card.address, card.port)) under_way_.push_back({peer, card.cookie, std::move(fd)});
  }

  /// Those that are through within the limit, by rank.
  std::map<int, UniqueFd> finish() {
    std::map<int, UniqueFd> through;
    const auto limit = Clock::now() + kConnectLimit;
    while (!under_way_.empty() && Clock::now() < limit) {
      std::vector<pollfd> events;
      for (const auto& call : under_way_) events.push_back({call.fd.get(), POLLOUT, 0});
      if (::poll(events.data(), events.size(), 50) <= 0) {
        if (check_) check_();
        continue;
      }
      for (std::size_t i = events.size(); i-- > 0;) {
        if (events[i].revents == 0) continue;
        if (call_error(under_way_[i].fd.get()) == 0 && greet(under_way_[i])) through[under_way_[i].peer] = std::move(under_way_[i].fd);
        under_way_.erase(under_way_.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
    return through;
  }

 private:
  struct One {
    int peer = -1;
    std::uint64_t cookie = 0;
    UniqueFd fd;
  };

  bool greet(const One& call) const {
    const Greeting greeting{call.cookie, rank_};
    if (::send(call.fd.get(), &greeting, sizeof(greeting), MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof(greeting))) return false;
    keep_alive(call.fd.get());
    return true;
  }

  const int rank_;
  const std::function<void()> check_;
  std::vector<One> under_way_;
};

/// The next caller that knows the cookie, and its rank; none when the limit passes.
std::pair<int, UniqueFd> answer(int listener, std::uint64_t cookie, Clock::time_point limit, const std::function<void()>& check) {
  while (wait_for(listener, POLLIN, limit, check)) {
    UniqueFd fd = accept_from(listener);
    Greeting greeting;
    if (!fd || !wait_for(fd.get(), POLLIN, limit, check)) continue;
    if (::recv(fd.get(), &greeting, sizeof(greeting), 0) != static_cast<ssize_t>(sizeof(greeting)) || greeting.cookie != cookie) continue;
    if (::send(fd.get(), &kWelcome, 1, MSG_NOSIGNAL) != 1) continue;
    keep_alive(fd.get());
    return {static_cast<int>(greeting.rank), std::move(fd)};
  }
  return {-1, UniqueFd()};
}

}  // namespace

// The lower rank of a pair calls. Who couldn't reach whom is exchanged, so that nobody waits for a call that doesn't come.
std::unique_ptr<RemoteWatch> RemoteWatch::connect(const HostMap& map, int rank, const std::string& address,
                                                  const HostGroup::Exchange& exchange, const std::function<void()>& check) {
  std::unique_ptr<RemoteWatch> watch(new RemoteWatch());
  const auto is_remote = [&](int peer) { return map.host[static_cast<std::size_t>(peer)] != map.host[static_cast<std::size_t>(rank)]; };
  CallCard mine = CallCard::at(address);
  const UniqueFd listener = listen_at(address, map.world_size(), mine.port);
  const auto cards = exchange(mine.text());
  Calls under_way(rank, check);
  for (int peer = rank + 1; peer < map.world_size(); ++peer)
    if (is_remote(peer)) under_way.start(peer, CallCard::parse(cards[static_cast<std::size_t>(peer)]));
  std::string reached;
  for (auto& [peer, fd] : under_way.finish()) {
    reached += cat(peer, ",");
    watch->peers_.push_back({peer, std::move(fd), {}, false, false});
  }
  const auto reports = exchange(reached);
  int calls = 0;
  for (int peer = 0; peer < rank; ++peer)
    if (is_remote(peer)) calls += ("," + reports[static_cast<std::size_t>(peer)]).find(cat(",", rank, ",")) != std::string::npos;
  for (const auto limit = Clock::now() + kConnectLimit; calls > 0 && listener; --calls) {
    auto [peer, fd] = answer(listener.get(), mine.cookie, limit, check);
    if (peer >= 0) watch->peers_.push_back({peer, std::move(fd), {}, true, false});
  }
  return watch;
}

RemoteWatch::~RemoteWatch() {
  if (fork_guard_.in_owner()) tell_last(cat(kLeaves, departure_));
}

void RemoteWatch::fail(std::string_view reason) {
  if (fork_guard_.in_owner()) tell_last(cat(kFails, reason.substr(0, kLongest)));
}

void RemoteWatch::set_departure(std::string_view why) {
  const std::lock_guard lock(mutex_);
  departure_ = why.substr(0, std::min(kLongest, why.find(kEnd)));
}

bool RemoteWatch::send_to(Peer& peer, std::string_view text) {
  return ::send(peer.fd.get(), text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(text.size());
}

void RemoteWatch::say(std::string_view text) {
  if (!fork_guard_.in_owner()) return;
  const std::string line = cat(kSays, text.substr(0, std::min(kLongest, text.find(kEnd))), kEnd);
  const std::lock_guard lock(mutex_);
  if (told_) return;
  for (auto& peer : peers_)
    if (!peer.choked && !peer.closed) peer.choked = !send_to(peer, line);
}

void RemoteWatch::tell_last(std::string_view text) {
  const std::lock_guard lock(mutex_);
  if (told_) return;
  told_ = true;
  for (auto& peer : peers_) (void)send_to(peer, peer.choked ? cat(kEnd, text) : std::string(text));
}

void RemoteWatch::listen_to(Peer& peer) {
  char bytes[256];
  for (bool more = true; more && !peer.closed;) {
    const ssize_t got = ::recv(peer.fd.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
    if (got > 0) {
      peer.heard.append(bytes, static_cast<std::size_t>(got));
    } else if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      more = false;
    } else if (got == 0 || errno != EINTR) {
      peer.closed = true;
    }
  }
  if (!peer.greeted && !peer.heard.empty()) {
    peer.greeted = peer.heard[0] == kWelcome;
    peer.heard.erase(0, 1);
  }
  if (peer.greeted) take_saying(peer);
}

void RemoteWatch::take_saying(Peer& peer) {
  while (!peer.heard.empty() && (peer.heard[0] == kSays || peer.heard[0] == kEnd)) {
    if (peer.heard[0] == kEnd) {  // of one that was choked before the first byte of a line
      peer.heard.erase(0, 1);
      continue;
    }
    const auto end = peer.heard.find(kEnd);
    if (end == std::string::npos) return;  // the rest is to come
    peer.says = peer.heard.substr(1, end - 1);
    peer.heard.erase(0, end + 1);
  }
}

RemoteWatch::Word RemoteWatch::word_of(int rank) {
  const std::lock_guard lock(mutex_);
  for (auto& peer : peers_) {
    if (peer.rank != rank) continue;
    listen_to(peer);
    if (!peer.greeted || peer.closed) return {};
    const auto silent = silence_s(peer.fd.get());
    return {silent.has_value(), silent.value_or(0), peer.says};
  }
  return {};
}

std::vector<RemoteWatch::End> RemoteWatch::ended() {
  const std::lock_guard lock(mutex_);
  std::vector<End> ends;
  for (auto& peer : peers_) {
    listen_to(peer);
    const char word = peer.heard.empty() ? 0 : peer.heard[0];
    if (!peer.greeted || (!peer.closed && word != kLeaves && word != kFails)) continue;
    if (word == kLeaves)
      ends.push_back({peer.rank, Kind::left, departure(peer.heard.substr(1))});
    else if (word == kFails)
      ends.push_back({peer.rank, Kind::failed, peer.heard.substr(1)});
    else
      ends.push_back({peer.rank, Kind::died, "is gone (its process or its host ended, or the network between them)"});
  }
  return ends;
}

}  // namespace unshard::comm
