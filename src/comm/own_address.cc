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

}  // namespace

std::string own_address() {
  const char* interfaces = std::getenv("GLOO_SOCKET_IFNAME");
  const std::string names(interfaces ? interfaces : "");
  const std::string found = names.empty() ? address_of_name() : address_of_interface(names.substr(0, names.find(',')));
  return found.empty() ? "127.0.0.1" : found;
}

}  // namespace unshard::comm
