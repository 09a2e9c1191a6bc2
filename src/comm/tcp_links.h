#pragma once
// What the kernel knows of this process's TCP connections, by the address at their other end: how fast, how far, how lossy a link is.
// It covers whatever runs over TCP (Gloo, the shard service, NCCL's sockets), and costs nothing until asked.
#include <cstdint>
#include <string>
#include <vector>

namespace unshard::comm {

struct TcpLink {
  std::string peer;  ///< address without port
  int connections = 0;
  std::int64_t bytes_sent = 0, bytes_received = 0, retransmitted_segments = 0;
  double send_bytes_per_s = 0;  ///< fastest delivery rate of a connection that sent at least 256 KiB; 0: not known
  double round_trip_s = 0;      ///< least seen
};

/// Loopback is left out unless asked for. Sorted by address.
std::vector<TcpLink> tcp_links(bool loopback_too = false);
/// Addresses of this machine's (network namespace's) interfaces, without loopback.
std::vector<std::string> interface_addresses();

}  // namespace unshard::comm
