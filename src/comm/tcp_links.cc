#include "comm/tcp_links.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <ifaddrs.h>
#include <linux/tcp.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>

namespace unshard::comm {

namespace {

constexpr std::int64_t kEnoughBytes = 256 << 10;  // below that a rate says more about waiting than about the link

struct Address {
  std::string text;
  bool loopback = false;
};

Address read_address(const sockaddr* from) {
  char text[INET6_ADDRSTRLEN] = {};
  if (from->sa_family == AF_INET) {
    const auto& v4 = *reinterpret_cast<const sockaddr_in*>(from);
    ::inet_ntop(AF_INET, &v4.sin_addr, text, sizeof(text));
    return {text, (ntohl(v4.sin_addr.s_addr) >> 24) == 127};
  }
  if (from->sa_family != AF_INET6) return {};
  const auto& v6 = *reinterpret_cast<const sockaddr_in6*>(from);
  if (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) {
    ::inet_ntop(AF_INET, v6.sin6_addr.s6_addr + 12, text, sizeof(text));
    return {text, v6.sin6_addr.s6_addr[12] == 127};
  }
  ::inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof(text));
  return {text, IN6_IS_ADDR_LOOPBACK(&v6.sin6_addr) != 0};
}

void add_socket(int fd, bool loopback_too, std::map<std::string, TcpLink>& links) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return;  // not a connected socket
  const Address peer = read_address(reinterpret_cast<sockaddr*>(&address));
  if (peer.text.empty() || (peer.loopback && !loopback_too)) return;
  tcp_info info{};
  length = sizeof(info);
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return;
  TcpLink& link = links[peer.text];
  link.peer = peer.text;
  ++link.connections;
  const double round_trip = (info.tcpi_min_rtt > 0 ? info.tcpi_min_rtt : info.tcpi_rtt) * 1e-6;
  if (round_trip > 0 && (link.round_trip_s == 0 || round_trip < link.round_trip_s)) link.round_trip_s = round_trip;
  link.retransmitted_segments += info.tcpi_total_retrans;
  if (length < offsetof(tcp_info, tcpi_bytes_sent) + sizeof(info.tcpi_bytes_sent)) return;  // an old kernel
  link.bytes_sent += static_cast<std::int64_t>(info.tcpi_bytes_sent);
  link.bytes_received += static_cast<std::int64_t>(info.tcpi_bytes_received);
  if (static_cast<std::int64_t>(info.tcpi_bytes_sent) >= kEnoughBytes)
    link.send_bytes_per_s = std::max(link.send_bytes_per_s, static_cast<double>(info.tcpi_delivery_rate));
}

}  // namespace

std::vector<TcpLink> tcp_links(bool loopback_too) {
  std::map<std::string, TcpLink> links;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc/self/fd"), &::closedir);
  while (folder) {
    const dirent* entry = ::readdir(folder.get());
    if (!entry) break;
    if (entry->d_name[0] != '.') add_socket(std::atoi(entry->d_name), loopback_too, links);
  }
  std::vector<TcpLink> sorted;
  for (auto& [peer, link] : links) sorted.push_back(std::move(link));
  return sorted;
}

std::vector<std::string> interface_addresses() {
  std::vector<std::string> addresses;
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return addresses;
  for (const ifaddrs* one = first; one; one = one->ifa_next) {
    if (!one->ifa_addr || !(one->ifa_flags & IFF_UP)) continue;
    const Address address = read_address(one->ifa_addr);
    if (!address.text.empty() && !address.loopback) addresses.push_back(address.text);
  }
  ::freeifaddrs(first);
  return addresses;
}

}  // namespace unshard::comm
