#include "comm/remote_watch.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <random>

#include "unshard/core/error.h"

namespace unshard::comm {

namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;
constexpr auto kConnectLimit = 10s;
constexpr char kWelcome = 'W', kLeaves = 'L', kFails = 'F';

/// What a connecting rank says first.
struct Greeting {
  std::uint64_t cookie = 0;  ///< the listener's: nobody else is let in
  std::int64_t rank = -1;
};

/// What a rank says about itself before anyone connects.
struct Card {
  std::string address;
  int port = 0;
  std::uint64_t cookie = 0;

  std::string text() const { return cat(port, " ", cookie, " ", address); }
  static Card parse(const std::string& text) {
    Card card;
    char* end = nullptr;
    card.port = static_cast<int>(std::strtol(text.c_str(), &end, 10));
    card.cookie = std::strtoull(end, &end, 10);
    card.address = *end == ' ' ? end + 1 : "";
    return card;
  }
};

struct Resolved {
  std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> info{nullptr, &::freeaddrinfo};
  Resolved(const std::string& address, int port) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
    if (::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found) == 0) info.reset(found);
  }
};

UniqueFd make_socket(int family) { return UniqueFd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

UniqueFd listen_at(const std::string& address, int peers, int& port) {
  const Resolved at(address, 0);
  if (!at.info) return {};
  UniqueFd fd = make_socket(at.info->ai_family);
  sockaddr_storage bound{};
  socklen_t length = sizeof(bound);
  if (!fd || ::bind(fd.get(), at.info->ai_addr, at.info->ai_addrlen) != 0 || ::listen(fd.get(), std::max(peers, 16)) != 0 ||
      ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound), &length) != 0)
    return {};
  port = ntohs(bound.ss_family == AF_INET ? reinterpret_cast<sockaddr_in*>(&bound)->sin_port
                                          : reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port);
  return fd;
}

/// Whether `events` came within the limit.
bool wait_for(int fd, short events, Clock::time_point limit, const std::function<void()>& check) {
  while (Clock::now() < limit) {
    pollfd one{fd, events, 0};
    if (::poll(&one, 1, 50) > 0) return true;
    if (check) check();
  }
  return false;
}

void keep_alive(int fd) {
  const auto set = [fd](int level, int option, int value) { ::setsockopt(fd, level, option, &value, sizeof(value)); };
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 3);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 2);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
}

UniqueFd call(const Card& card, int rank, const std::function<void()>& check) {
  const Resolved at(card.address, card.port);
  if (!at.info || card.port == 0) return {};
  UniqueFd fd = make_socket(at.info->ai_family);
  if (!fd) return {};
  if (::connect(fd.get(), at.info->ai_addr, at.info->ai_addrlen) != 0) {
    int error = errno;
    socklen_t length = sizeof(error);
    if (error != EINPROGRESS || !wait_for(fd.get(), POLLOUT, Clock::now() + kConnectLimit, check)) return {};
    if (::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0 || error != 0) return {};
  }
  const Greeting greeting{card.cookie, rank};
  if (::send(fd.get(), &greeting, sizeof(greeting), MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof(greeting))) return {};
  keep_alive(fd.get());
  return fd;
}

/// The next caller that knows the cookie, and its rank; none when the limit passes.
std::pair<int, UniqueFd> answer(int listener, std::uint64_t cookie, Clock::time_point limit, const std::function<void()>& check) {
  while (wait_for(listener, POLLIN, limit, check)) {
    UniqueFd fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
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
  std::random_device random;
  Card mine{address, 0, (static_cast<std::uint64_t>(random()) << 32 | random()) >> 1};
  const UniqueFd listener = listen_at(address, map.world_size(), mine.port);
  const auto cards = exchange(mine.text());
  std::string reached;
  for (int peer = rank + 1; peer < map.world_size(); ++peer) {
    if (!is_remote(peer)) continue;
    UniqueFd fd = call(Card::parse(cards[static_cast<std::size_t>(peer)]), rank, check);
    if (!fd) continue;
    reached += cat(peer, ",");
    watch->peers_.push_back({peer, std::move(fd), {}, false, false});
  }
  const auto reports = exchange(reached);
  int calls = 0;
  for (int peer = 0; peer < rank; ++peer)
    if (is_remote(peer)) calls += ("," + reports[static_cast<std::size_t>(peer)]).find(cat(",", rank, ",")) != std::string::npos;
  for (; calls > 0 && listener; --calls) {
    auto [peer, fd] = answer(listener.get(), mine.cookie, Clock::now() + kConnectLimit, check);
    if (peer >= 0) watch->peers_.push_back({peer, std::move(fd), {}, true, false});
  }
  return watch;
}

RemoteWatch::~RemoteWatch() {
  if (fork_guard_.in_owner()) tell(std::string_view(&kLeaves, 1));
}

void RemoteWatch::fail(std::string_view reason) {
  if (fork_guard_.in_owner()) tell(cat(kFails, reason.substr(0, 1000)));
}

void RemoteWatch::tell(std::string_view text) {
  const std::lock_guard lock(mutex_);
  if (told_) return;
  told_ = true;
  for (const auto& peer : peers_) (void)::send(peer.fd.get(), text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
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
  if (peer.greeted || peer.heard.empty()) return;
  peer.greeted = peer.heard[0] == kWelcome;
  peer.heard.erase(0, 1);
}

std::vector<RemoteWatch::End> RemoteWatch::ended() {
  const std::lock_guard lock(mutex_);
  std::vector<End> ends;
  for (auto& peer : peers_) {
    listen_to(peer);
    if (!peer.greeted || (!peer.closed && peer.heard.empty())) continue;
    const char word = peer.heard.empty() ? 0 : peer.heard[0];
    if (word == kLeaves)
      ends.push_back({peer.rank, Kind::left, "left the group (it ended in good order)"});
    else if (word == kFails)
      ends.push_back({peer.rank, Kind::failed, cat("failed: ", peer.heard.substr(1))});
    else
      ends.push_back({peer.rank, Kind::died, "is gone (its process on another host ended)"});
  }
  return ends;
}

}  // namespace unshard::comm
