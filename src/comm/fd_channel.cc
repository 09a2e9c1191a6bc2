#include "comm/fd_channel.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "unshard/core/error.h"

namespace unshard::comm {

namespace {

[[noreturn]] void fail(const char* call) { throw CommError(cat("[comm.connect] Unix socket, ", call, ": ", std::strerror(errno))); }

std::string random_name() {
  std::uint64_t bits[2] = {};
  if (::getrandom(bits, sizeof(bits), 0) != static_cast<ssize_t>(sizeof(bits))) fail("getrandom");
  char text[64];
  std::snprintf(text, sizeof(text), "unshard-%016lx%016lx", static_cast<unsigned long>(bits[0]), static_cast<unsigned long>(bits[1]));
  return text;
}

socklen_t abstract_address(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // a leading zero byte: the abstract namespace
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

void wait_readable(int fd, const WaitCheck& check) {
  for (;;) {
    pollfd poll_fd{fd, POLLIN, 0};
    const int ready = ::poll(&poll_fd, 1, 10);
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) fail("poll");
    if (check) check();
  }
}

bool same_user(int fd) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 && credentials.uid == ::getuid();
}

}  // namespace

FdListener::FdListener() : socket_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)), name_(random_name()) {
  if (!socket_) fail("socket");
  sockaddr_un address;
  const socklen_t length = abstract_address(name_, address);
  if (::bind(socket_.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) fail("bind");
  if (::listen(socket_.get(), 128) != 0) fail("listen");
}

FdChannel FdChannel::accept_all(const FdListener& listener, int size, const WaitCheck& check) {
  FdChannel channel;
  channel.sockets_.resize(static_cast<std::size_t>(size));
  for (int missing = size - 1; missing > 0;) {
    wait_readable(listener.socket().get(), check);
    UniqueFd peer(::accept4(listener.socket().get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!peer || !same_user(peer.get())) continue;
    std::int32_t rank = -1;
    wait_readable(peer.get(), check);
    if (::recv(peer.get(), &rank, sizeof(rank), 0) != static_cast<ssize_t>(sizeof(rank)) || rank < 1 || rank >= size) continue;
    if (!channel.sockets_[static_cast<std::size_t>(rank)]) --missing;
    channel.sockets_[static_cast<std::size_t>(rank)] = std::move(peer);
  }
  return channel;
}

FdChannel FdChannel::connect_to(const std::string& name, int rank) {
  FdChannel channel;
  channel.sockets_.emplace_back(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  const int fd = channel.sockets_[0].get();
  if (fd < 0) fail("socket");
  sockaddr_un address;
  const socklen_t length = abstract_address(name, address);
  if (::connect(fd, reinterpret_cast<sockaddr*>(&address), length) != 0) fail("connect (has the first rank of this host ended?)");
  const std::int32_t id = rank;
  if (::send(fd, &id, sizeof(id), MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof(id))) fail("send");
  return channel;
}

void FdChannel::send_to_all(int fd) const {
  for (const auto& socket : sockets_) {
    if (!socket) continue;
    char byte = 'f';
    iovec data{&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
    while (::sendmsg(socket.get(), &message, MSG_NOSIGNAL) < 0)
      if (errno != EINTR) fail("sendmsg");
  }
}

UniqueFd FdChannel::receive(const WaitCheck& check) const {
  const int socket = sockets_.at(0).get();
  wait_readable(socket, check);
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t got;
  while ((got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC)) < 0)
    if (errno != EINTR) fail("recvmsg");
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (got != 1 || !header || header->cmsg_type != SCM_RIGHTS) {
    if (check) check();  // says which peer died, when one did
    throw CommError("[comm.connect] the first rank of this host closed its Unix socket before it sent the shared memory");
  }
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof(int));
  return UniqueFd(fd);
}

}  // namespace unshard::comm
