#include "zero/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string_view>
#include <system_error>

#include "unshard/core/error.h"

namespace unshard::net {
namespace {

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

std::string namespace_identity(const char* path) {
  struct stat info {};
  if (stat(path, &info) != 0) return cat(boot_id(), "/?", getpid());  // unknown: a host of its own, which is always right
  return cat(boot_id(), "/", info.st_dev, ":", info.st_ino);
}

void set_up(int fd) {
  const int on = 1, idle_s = 30, interval_s = 10, probes = 3;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  // A host that vanishes sends nothing: probes find out in about a minute even when no time-out was asked for.
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

bool is_bridge(std::string_view interface) {
  for (const std::string_view prefix : {"docker", "br-", "veth", "virbr", "cni", "flannel", "podman"})
    if (interface.starts_with(prefix)) return true;
  return false;
}

// Bound and listening, or invalid with errno set.
Descriptor try_listen(int family, bool loopback_only, int* port) {
  Descriptor fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return fd;
  sockaddr_storage storage{};
  socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  storage.ss_family = static_cast<sa_family_t>(family);
  if (family == AF_INET) {
    reinterpret_cast<sockaddr_in&>(storage).sin_addr.s_addr = htonl(loopback_only ? INADDR_LOOPBACK : INADDR_ANY);
  } else {
    const int off = 0;
    setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    reinterpret_cast<sockaddr_in6&>(storage).sin6_addr = in6addr_any;
  }
  auto* address = reinterpret_cast<sockaddr*>(&storage);
  if (bind(fd.get(), address, length) != 0 || ::listen(fd.get(), 1024) != 0 || getsockname(fd.get(), address, &length) != 0)
    return Descriptor();
  *port = ntohs(family == AF_INET ? reinterpret_cast<sockaddr_in&>(storage).sin_port : reinterpret_cast<sockaddr_in6&>(storage).sin6_port);
  return fd;
}

}  // namespace

std::string network_identity() { return namespace_identity("/proc/self/ns/net"); }
std::string process_identity() { return namespace_identity("/proc/self/ns/pid"); }
std::string error_text(int error_number) { return std::generic_category().message(error_number); }

std::vector<std::string> own_addresses() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return {};
  std::vector<std::string> likely, bridges;
  for (const ifaddrs* it = list; it != nullptr; it = it->ifa_next) {
    if (it->ifa_addr == nullptr || !(it->ifa_flags & IFF_UP) || (it->ifa_flags & IFF_LOOPBACK)) continue;
    char text[INET6_ADDRSTRLEN] = {};
    if (it->ifa_addr->sa_family == AF_INET) {
      inet_ntop(AF_INET, &reinterpret_cast<sockaddr_in*>(it->ifa_addr)->sin_addr, text, sizeof text);
    } else if (it->ifa_addr->sa_family == AF_INET6) {
      const auto& address = reinterpret_cast<sockaddr_in6*>(it->ifa_addr)->sin6_addr;
      if (IN6_IS_ADDR_LINKLOCAL(&address)) continue;  // needs a scope that means nothing on another host
      inet_ntop(AF_INET6, &address, text, sizeof text);
    } else {
      continue;
    }
    (is_bridge(it->ifa_name) ? bridges : likely).emplace_back(text);
  }
  freeifaddrs(list);
  likely.insert(likely.end(), bridges.begin(), bridges.end());
  return likely;
}

Listener listen(bool loopback_only) {
  Listener listener;
  if (!loopback_only) listener.socket = try_listen(AF_INET6, false, &listener.port);  // serves IPv4 too
  if (!listener.socket) listener.socket = try_listen(AF_INET, loopback_only, &listener.port);
  if (!listener.socket) throw CommError(cat("[zero.shards] no TCP port to listen on: ", error_text(errno)));
  return listener;
}

Descriptor connect(const std::string& address, int port, std::chrono::milliseconds timeout, std::string* error) {
  sockaddr_storage storage{};
  socklen_t length = sizeof(sockaddr_in);
  auto& v4 = reinterpret_cast<sockaddr_in&>(storage);
  auto& v6 = reinterpret_cast<sockaddr_in6&>(storage);
  if (inet_pton(AF_INET, address.c_str(), &v4.sin_addr) == 1) {
    v4.sin_family = AF_INET;
    v4.sin_port = htons(static_cast<std::uint16_t>(port));
  } else if (inet_pton(AF_INET6, address.c_str(), &v6.sin6_addr) == 1) {
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(static_cast<std::uint16_t>(port));
    length = sizeof(sockaddr_in6);
  } else {
    *error = "not an address: " + address;
    return Descriptor();
  }
  Descriptor fd(::socket(storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  int failure = fd ? 0 : errno;
  if (fd && ::connect(fd.get(), reinterpret_cast<sockaddr*>(&storage), length) != 0) {
    failure = errno;
    if (failure == EINPROGRESS) {
      pollfd wait{fd.get(), POLLOUT, 0};
      socklen_t size = sizeof failure;
      int ready;
      do ready = poll(&wait, 1, static_cast<int>(timeout.count()));
      while (ready < 0 && errno == EINTR);
      if (ready <= 0)
        failure = ETIMEDOUT;
      else
        getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &failure, &size);
    }
  }
  if (failure != 0) {
    *error = cat(address, " port ", port, ": ", error_text(failure), failure == EMFILE ? " (raise the limit: ulimit -n)" : "");
    return Descriptor();
  }
  set_up(fd.get());
  return fd;
}

Descriptor accept(int listener) {
  Descriptor fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (fd) set_up(fd.get());
  return fd;
}

Descriptor watch_process(int pid) {
#ifdef SYS_pidfd_open
  return Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
#else
  (void)pid;
  return Descriptor();
#endif
}

}  // namespace unshard::net
