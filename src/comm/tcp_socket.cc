#include "comm/tcp_socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <memory>

namespace unshard::comm {

namespace {

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

constexpr int kKeepIdle_s = 2, kGoneAfter_s = 9;

void set_option(int fd, int level, int option, int value) { ::setsockopt(fd, level, option, &value, sizeof(value)); }

}  // namespace

UniqueFd listen_at(const std::string& address, int backlog, int& port) {
  const Resolved at(address, 0);
  if (!at.info) return {};
  UniqueFd fd = make_socket(at.info->ai_family);
  sockaddr_storage bound{};
  socklen_t length = sizeof(bound);
  if (!fd || ::bind(fd.get(), at.info->ai_addr, at.info->ai_addrlen) != 0 || ::listen(fd.get(), std::max(backlog, 16)) != 0 ||
      ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound), &length) != 0)
    return {};
  port = ntohs(bound.ss_family == AF_INET ? reinterpret_cast<sockaddr_in*>(&bound)->sin_port
                                          : reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port);
  return fd;
}

UniqueFd accept_from(int listener) { return UniqueFd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)); }

UniqueFd start_call(const std::string& address, int port) {
  const Resolved at(address, port);
  if (!at.info || port == 0) return {};
  UniqueFd fd = make_socket(at.info->ai_family);
  if (fd && ::connect(fd.get(), at.info->ai_addr, at.info->ai_addrlen) != 0 && errno != EINPROGRESS) fd.reset();
  return fd;
}

int call_error(int fd) {
  int error = 0;
  socklen_t length = sizeof(error);
  return ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 ? error : errno;
}

void keep_alive(int fd) {
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, kKeepIdle_s);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, kGoneAfter_s - kKeepIdle_s);
  set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, kGoneAfter_s * 1000);  // probes stop while something sent isn't acknowledged
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
}

std::optional<double> silence_s(int fd) {
  tcp_info info{};
  socklen_t length = sizeof(info);
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0 || info.tcpi_state != TCP_ESTABLISHED) return std::nullopt;
  const double since_s = 1e-3 * info.tcpi_last_ack_recv;
  return since_s > kKeepIdle_s + 1 ? since_s : 0;
}

bool wait_for(int fd, short events, std::chrono::steady_clock::time_point limit, const std::function<void()>& check) {
  while (std::chrono::steady_clock::now() < limit) {
    pollfd one{fd, events, 0};
    if (::poll(&one, 1, 50) > 0) return true;
    if (check) check();
  }
  return false;
}

}  // namespace unshard::comm
