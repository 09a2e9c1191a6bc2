#pragma once
// Small TCP connections of the engine's own: non-blocking, numeric addresses only.
#include <chrono>
#include <functional>
#include <optional>
#include <string>

#include "comm/unique_fd.h"

namespace unshard::comm {

/// Listens at `address` on a port that the system chooses; empty where that can't be.
UniqueFd listen_at(const std::string& address, int backlog, int& port);

/// The next caller, or empty when there is none.
UniqueFd accept_from(int listener);

/// A call that is under way: its socket becomes writable when it is through, or has failed. Empty: the address is of no use.
UniqueFd start_call(const std::string& address, int port);

/// Errno of a call whose socket became writable; 0: it is through.
int call_error(int fd);

/// One without a word for 9 s (power, cable) counts as closed.
void keep_alive(int fd);

/// For how long the other host has answered nothing on a connection that is kept alive; 0: it answers; none: not known.
std::optional<double> silence_s(int fd);

/// Whether `events` came before `limit`; `check` is called about every 50 ms and may throw to leave.
bool wait_for(int fd, short events, std::chrono::steady_clock::time_point limit, const std::function<void()>& check);

}  // namespace unshard::comm
