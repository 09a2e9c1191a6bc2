#include "zero/shard_peer.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <thread>

#include "unshard/core/error.h"

namespace unshard {
namespace {
constexpr std::chrono::milliseconds kConnectTime{3000};
constexpr std::chrono::seconds kWelcomeTime{30};  // the other side is up already; long because machines get busy
}  // namespace

std::string ShardPeer::card(int port, const std::vector<std::string>& addresses) {
  std::ostringstream out;
  out << "shards1 " << net::network_identity() << ' ' << net::process_identity() << ' ' << ::getpid() << ' ' << port;
  for (const auto& address : addresses) out << ' ' << address;
  return out.str();
}

ShardPeer::ShardPeer(int own_rank, int rank, const std::string& card) : own_rank_(own_rank), rank_(rank) {
  std::istringstream in(card);
  std::string word, network, process;
  if (!(in >> word >> network >> process >> pid_ >> port_) || word != "shards1")
    throw CommError(cat("[zero.shards] rank ", rank, " runs another version: it sent \"", card.substr(0, 60), "\""));
  while (in >> word) addresses_.push_back(word);
  if (network == net::network_identity()) addresses_ = {"127.0.0.1"};
  if (process != net::process_identity() || pid_ == ::getpid()) return;
  process_ = net::watch_process(pid_);
  gone_ = !process_ && errno == ESRCH;
}

std::string ShardPeer::obituary() const { return cat("rank ", rank_, " is gone: its process (pid ", pid_, ") has ended"); }

std::string ShardWait::who_ended() const {
  std::string text;
  for (int attempt = 0; ended && attempt < 20 && (text = ended()).empty(); ++attempt)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return text;
}

// What is known of its end comes first. Who was reached before has open ports: then it isn't a firewall.
std::string ShardPeer::unreachable(const std::string& errors, const ShardWait& wait) const {
  const std::string known = wait.who_ended();
  pollfd ended{process_.get(), POLLIN, 0};
  if (gone_ || (process_ && ::poll(&ended, 1, 0) > 0)) return cat(obituary(), known.empty() ? "" : "; ", known);
  if (!known.empty()) return cat(known, "; rank ", rank_, " can't be reached: ", errors);
  if (reached_)
    return cat("rank ", rank_, " can't be reached any more: ", errors,
               ". It was at the start: has its process or its host ended, or the network between them?");
  return cat("rank ", rank_, " can't be reached: ", errors,
             ". Ranks read parameters from each other over TCP; open the ports between them");
}

net::Descriptor ShardPeer::connect(const wire::Secret& secret, const ShardWait& wait, std::size_t* used) const {
  std::string errors;
  for (std::size_t i = 0; i < addresses_.size(); ++i) {
    std::string error;
    if (auto socket = try_address(addresses_[i], secret, wait, &error)) {
      if (used != nullptr) *used = i;
      return socket;
    }
    errors += (errors.empty() ? "" : "; ") + error;
  }
  if (errors.empty()) errors = "it has no network address";
  throw CommError(unreachable(errors, wait));
}

net::Descriptor ShardPeer::try_address(const std::string& address, const wire::Secret& secret, const ShardWait& wait,
                                       std::string* error) const {
  auto socket = net::connect(address, port_, kConnectTime, error);
  if (!socket) return socket;
  wire::Hello hello{.secret = {}, .from = own_rank_, .to = rank_};
  std::memcpy(hello.secret.data(), secret.data(), hello.secret.size());
  // A fresh connection's send buffer holds more than these few bytes.
  if (::send(socket.get(), &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello) {
    *error = cat(address, ": ", net::error_text(errno));
    return net::Descriptor();
  }
  wire::Welcome welcome;
  std::size_t have = 0;
  const auto limit = std::min(std::chrono::duration<double>(kWelcomeTime), wait.timeout);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(limit);
  while (have < sizeof welcome) {
    pollfd waits[2] = {{socket.get(), POLLIN, 0}, {process_.get(), POLLIN, 0}};
    ::poll(waits, 2, kWaitSliceMs);
    if (waits[0].revents != 0) {
      const ssize_t got = ::recv(socket.get(), reinterpret_cast<std::byte*>(&welcome) + have, sizeof welcome - have, 0);
      if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) {
        *error = cat(address, " port ", port_, ": not rank ", rank_, " (the connection was refused)");
        return net::Descriptor();
      }
      have += static_cast<std::size_t>(std::max<ssize_t>(got, 0));
    } else if (waits[1].revents & POLLIN) {
      throw CommError(obituary());
    } else if (std::chrono::steady_clock::now() > deadline) {
      *error = cat(address, " port ", port_, ": no answer");
      return net::Descriptor();
    }
    if (wait.interrupt_check) wait.interrupt_check();
  }
  if (std::memcmp(welcome.secret.data(), secret.data() + hello.secret.size(), welcome.secret.size()) != 0) {
    *error = cat(address, " port ", port_, ": not rank ", rank_);
    return net::Descriptor();
  }
  return socket;
}

}  // namespace unshard
