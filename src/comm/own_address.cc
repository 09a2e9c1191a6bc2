#include "comm/own_address.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>

#include "comm/unique_fd.h"

namespace unshard::comm {

namespace {

std::string numeric(const sockaddr* address, socklen_t length) {
  char text[NI_MAXHOST] = {};
  return ::getnameinfo(address, length, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) == 0 ? text : "";
}

std::string address_of_interface(const std::string& name) {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(all, &::freeifaddrs);
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
      if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != family || name != one->ifa_name) continue;
      return numeric(one->ifa_addr, family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    }
  }
  return {};
}

bool can_bind(const addrinfo& info) {
  const UniqueFd fd(::socket(info.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  return fd && ::bind(fd.get(), info.ai_addr, info.ai_addrlen) == 0;
}

std::string address_of_name() {
  char name[HOST_NAME_MAX + 1] = {};
  if (::gethostname(name, sizeof(name) - 1) != 0) return {};
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* all = nullptr;
  if (::getaddrinfo(name, nullptr, &hints, &all) != 0) return {};
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(all, &::freeaddrinfo);
  for (const addrinfo* one = all; one != nullptr; one = one->ai_next)
    if (can_bind(*one)) return numeric(one->ai_addr, one->ai_addrlen);
  return {};
}

std::string chosen_interfaces() {
  const char* names = std::getenv("GLOO_SOCKET_IFNAME");
  return names ? names : "";
}

/// Of this machine's end of the way to MASTER_ADDR; nothing is sent.
std::string address_towards_master() {
  const char* master = std::getenv("MASTER_ADDR");
  if (master == nullptr || *master == 0) return {};
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* all = nullptr;
  if (::getaddrinfo(master, "9", &hints, &all) != 0) return {};
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(all, &::freeaddrinfo);
  for (const addrinfo* one = all; one != nullptr; one = one->ai_next) {
    const UniqueFd fd(::socket(one->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_storage mine{};
    socklen_t length = sizeof(mine);
    if (fd && ::connect(fd.get(), one->ai_addr, one->ai_addrlen) == 0 &&
        ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&mine), &length) == 0)
      return numeric(reinterpret_cast<sockaddr*>(&mine), length);
  }
  return {};
}

}  // namespace

bool is_loopback(const std::string& address) { return address.starts_with("127.") || address == "::1"; }

std::string interface_for_gloo() {
  const std::string address = own_address();
  if (!chosen_interfaces().empty() || is_loopback(address) || address == address_of_name()) return {};
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(all, &::freeifaddrs);
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || (one->ifa_addr->sa_family != AF_INET && one->ifa_addr->sa_family != AF_INET6)) continue;
    if (numeric(one->ifa_addr, one->ifa_addr->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6)) == address)
      return one->ifa_name;
  }
  return {};
}

std::string own_address() {
  const std::string names = chosen_interfaces();
  std::string found = names.empty() ? address_of_name() : address_of_interface(names.substr(0, names.find(',')));
  if (names.empty() && (found.empty() || is_loopback(found)))
    if (const std::string other = address_towards_master(); !other.empty() && !is_loopback(other)) found = other;
  return found.empty() ? "127.0.0.1" : found;
}

}  // namespace unshard::comm
