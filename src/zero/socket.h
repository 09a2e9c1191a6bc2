#pragma once
// Plain TCP for the one-sided service: listening, connecting with a time-out, who is on this host.
#include <chrono>
#include <string>
#include <vector>

#include "comm/unique_fd.h"

namespace unshard::net {

using Descriptor = comm::UniqueFd;

/// Names this host's network (processes with equal values reach each other over loopback) and its process ids (pidfds are meaningful).
std::string network_identity();
std::string process_identity();

/// Addresses under which other hosts may reach this one, numeric, likely ones first (bridges of containers last).
std::vector<std::string> own_addresses();

struct Listener {
  Descriptor socket;
  int port = 0;
};
/// Non-blocking, on a free port. \throws CommError with the system's reason.
Listener listen(bool loopback_only);

/// Connected, non-blocking, without Nagle's delay. An invalid descriptor and *error when it can't be had in time.
Descriptor connect(const std::string& address, int port, std::chrono::milliseconds timeout, std::string* error);
/// The next waiting connection, set up like connect()'s; invalid when none waits.
Descriptor accept(int listener);

/// A descriptor that becomes readable when the process ends; invalid where the kernel has none.
Descriptor watch_process(int pid);
/// "Connection reset by peer".
std::string error_text(int error_number);

}  // namespace unshard::net
