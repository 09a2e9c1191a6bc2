#pragma once
// Descriptors between the ranks of a host: rank 0 is connected with every other rank by an abstract Unix socket (no file is left behind).
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "comm/unique_fd.h"

namespace unshard::comm {

/// Called about every 10 ms while a socket is waited for; throws to leave (a peer died, Ctrl-C, time-out).
using WaitCheck = std::function<void()>;

class FdListener {
 public:
  FdListener();  ///< binds a random abstract name
  const std::string& name() const { return name_; }
  const UniqueFd& socket() const { return socket_; }

 private:
  UniqueFd socket_;
  std::string name_;
};

class FdChannel {
 public:
  /// Rank 0: accept every other rank of this user.
  static FdChannel accept_all(const FdListener& listener, int size, const WaitCheck& check);
  /// Other ranks.
  static FdChannel connect_to(const std::string& name, int rank);

  /// Rank 0 only: hand `fd` to every other rank.
  void send_to_all(int fd) const;
  /// Others: the next descriptor from rank 0.
  UniqueFd receive(const WaitCheck& check) const;

 private:
  std::vector<UniqueFd> sockets_;  ///< at rank 0 one a peer, elsewhere one
};

}  // namespace unshard::comm
