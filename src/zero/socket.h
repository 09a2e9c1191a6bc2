#pragma once
// Plain TCP for the one-sided service: descriptors that close themselves, listening, connecting with a time-out, who is on this host.
#include <chrono>
#include <string>
#include <utility>
#include <vector>

namespace unshard::net {

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) reset(std::exchange(other.fd_, -1));
    return *this;
  }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset(int fd = -1);

 private:
  int fd_;
};

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
