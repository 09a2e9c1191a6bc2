#include "zero/shard_server.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <deque>
#include <exception>

#include "unshard/core/error.h"

namespace unshard {
namespace {

constexpr std::size_t kMaxWanted = 1 << 20;  // pieces in one request; more is not a request of ours
constexpr std::size_t kReadBytes = 64 << 10;
constexpr std::size_t kMaxIovecs = 64;
constexpr int kPostponedMs = 2;              // between looks whether a postponed answer can be given
constexpr std::size_t kSendBytes = 8 << 20;  // per turn, so that one fast reader doesn't starve the others

using Clock = std::chrono::steady_clock;

// One answer on its way out. `text` is what `parts` point into for an error; pieces are sent from where they rest.
struct Reply {
  wire::ReplyHeader header{};
  std::string text;
  std::vector<std::span<const std::byte>> parts;
};

}  // namespace

// States: greeting (no valid Hello yet) -> serving -> closed.
struct ShardServer::Connection {
  enum class State { greeting, serving, closed };
  net::Descriptor socket;
  State state = State::greeting;
  std::vector<std::byte> input;  // received, not yet understood
  std::deque<Reply> replies;
  wire::Welcome welcome{};
  std::span<const std::byte> greeting;         // the rest of `welcome` to send
  std::size_t part = 0, offset = 0;            // what of replies.front() has gone: header is part 0
  std::optional<Clock::time_point> postponed;  // since when the first request in `input` waits for a parameter to be added

  bool wants_to_send() const { return !greeting.empty() || !replies.empty(); }
  void receive(ShardServer& server);
  void understand(ShardServer& server);
  std::optional<Reply> answer(const ShardServer& server, const std::byte* wanted, std::size_t count) const;
  void send();
  void advance(std::size_t sent);
};

void ShardServer::Connection::receive(ShardServer& server) {
  const std::size_t had = input.size();
  input.resize(had + kReadBytes);
  const ssize_t got = ::recv(socket.get(), input.data() + had, kReadBytes, 0);
  input.resize(had + std::max<ssize_t>(got, 0));
  if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) {
    state = State::closed;
    return;
  }
  understand(server);
}

void ShardServer::Connection::understand(ShardServer& server) {
  std::size_t used = 0;
  if (state == State::greeting) {
    if (input.size() < sizeof(wire::Hello)) return;
    wire::Hello hello;
    std::memcpy(&hello, input.data(), sizeof hello);
    used = sizeof hello;
    if (hello.to != server.rank_ || std::memcmp(hello.secret.data(), server.secret_.data(), hello.secret.size()) != 0) {
      state = State::closed;  // a stranger, or a rank that tried the address of another host
      return;
    }
    std::memcpy(welcome.secret.data(), server.secret_.data() + hello.secret.size(), welcome.secret.size());
    greeting = std::as_bytes(std::span(&welcome, 1));
    state = State::serving;
  }
  while (input.size() - used >= sizeof(wire::RequestHeader)) {
    wire::RequestHeader header;
    std::memcpy(&header, input.data() + used, sizeof header);
    if (header.count > kMaxWanted) {
      state = State::closed;
      return;
    }
    const std::size_t bytes = sizeof header + header.count * sizeof(wire::WantedPiece);
    if (input.size() - used < bytes) break;
    auto reply = answer(server, input.data() + used + sizeof header, header.count);
    if (!reply) {  // stays in `input`; the thread goes on with other connections and looks again
      if (!postponed) postponed = Clock::now();
      break;
    }
    postponed.reset();
    if (!reply->header.failed) server.bytes_sent_.fetch_add(static_cast<std::int64_t>(reply->header.bytes), std::memory_order_relaxed);
    replies.push_back(*std::move(reply));
    used += bytes;
  }
  input.erase(input.begin(), input.begin() + static_cast<std::ptrdiff_t>(used));
}

std::optional<Reply> ShardServer::Connection::answer(const ShardServer& server, const std::byte* wanted, std::size_t count) const {
  Reply reply;
  try {
    for (std::size_t i = 0; i < count; ++i) {
      wire::WantedPiece want;
      std::memcpy(&want, wanted + i * sizeof want, sizeof want);
      const auto found = server.lookup_(static_cast<int>(want.id));
      if (!found) {
        if (!postponed || Clock::now() - *postponed < server.patience_) return std::nullopt;
        throw std::invalid_argument(cat("parameter ", want.id, " was not added on rank ", server.rank_, " within ",
                                        server.patience_.count(), " s; ranks must add the same parameters in the same order"));
      }
      const auto piece = *found;
      require(piece.size() == want.bytes, "parameter ", want.id, ": the reader expects a piece of ", want.bytes, " bytes, rank ",
              server.rank_, " holds ", piece.size(), "; ranks must add the same parameters in the same order");
      if (!piece.empty()) reply.parts.push_back(piece);
      reply.header.bytes += piece.size();
    }
  } catch (const std::exception& error) {  // the reader's to report: it knows what it wanted the parameter for
    reply.parts.clear();
    reply.text = error.what();
    reply.header = {.bytes = reply.text.size(), .failed = 1};
  }
  return reply;
}

void ShardServer::Connection::send() {
  std::array<iovec, kMaxIovecs> parts;
  std::size_t count = 0, bytes = 0;
  const auto put = [&](const void* data, std::size_t size) {
    size = std::min(size, kSendBytes - bytes);
    parts[count++] = {const_cast<void*>(data), size};
    bytes += size;
  };
  if (!greeting.empty()) {
    put(greeting.data(), greeting.size());
  } else {
    const Reply& reply = replies.front();
    const auto header = std::as_bytes(std::span(&reply.header, 1));
    if (part == 0) put(header.data() + offset, header.size() - offset);
    if (reply.header.failed) {
      if (part <= 1) put(reply.text.data() + (part == 1 ? offset : 0), reply.text.size() - (part == 1 ? offset : 0));
    } else {
      for (std::size_t i = part == 0 ? 0 : part - 1; i < reply.parts.size() && count < kMaxIovecs && bytes < kSendBytes; ++i) {
        const std::size_t skip = i + 1 == part ? offset : 0;
        put(reply.parts[i].data() + skip, reply.parts[i].size() - skip);
      }
    }
  }
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = count;
  const ssize_t sent = ::sendmsg(socket.get(), &message, MSG_NOSIGNAL);
  if (sent >= 0)
    advance(static_cast<std::size_t>(sent));
  else if (errno != EAGAIN && errno != EINTR)
    state = State::closed;
}

void ShardServer::Connection::advance(std::size_t sent) {
  if (!greeting.empty()) {
    greeting = greeting.subspan(sent);
    return;
  }
  const Reply& reply = replies.front();
  const std::size_t parts = 1 + (reply.header.failed ? 1 : reply.parts.size());
  while (part < parts) {
    const std::size_t size = part == 0 ? sizeof reply.header : reply.header.failed ? reply.text.size() : reply.parts[part - 1].size();
    if (sent < size - offset) {
      offset += sent;
      return;
    }
    sent -= size - offset;
    offset = 0;
    ++part;
  }
  part = 0;
  replies.pop_front();
}

ShardServer::ShardServer(int rank, net::Listener listener, wire::Secret secret, ShardService::Lookup lookup,
                         std::chrono::duration<double> patience)
    : rank_(rank),
      process_(::getpid()),
      secret_(secret),
      lookup_(std::move(lookup)),
      patience_(patience * 0.8),  // before the reader gives up, which knows less
      listener_(std::move(listener)),
      stop_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!stop_) throw CommError(cat("[zero.shards] rank ", rank, ": no eventfd: ", net::error_text(errno)));
  // Signals are for the threads of the program (Ctrl-C in Python): the new thread inherits a full mask.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread_.native_handle(), "unshard-shards");
}

ShardServer::~ShardServer() {
  if (::getpid() != process_) {  // a forked child has the object but not the thread
    thread_.detach();
    return;
  }
  const std::uint64_t one = 1;
  while (::write(stop_.get(), &one, sizeof one) < 0 && errno == EINTR) {
  }
  thread_.join();
}

void ShardServer::accept_waiting() {
  while (auto socket = net::accept(listener_.socket.get())) {
    connections_.push_back(std::make_unique<Connection>());
    connections_.back()->socket = std::move(socket);
  }
  // Out of descriptors: the waiting connection keeps the listener readable; don't spin on it.
  if (errno == EMFILE || errno == ENFILE) std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

// Every descriptor is non-blocking and poll the only place that waits, so `stop_` ends the thread whatever the peers do.
void ShardServer::run() {
  std::vector<pollfd> waits;
  for (;;) {
    waits.assign({{stop_.get(), POLLIN, 0}, {listener_.socket.get(), POLLIN, 0}});
    bool postponed = false;
    for (const auto& connection : connections_) {
      waits.push_back({connection->socket.get(), static_cast<short>(POLLIN | (connection->wants_to_send() ? POLLOUT : 0)), 0});
      postponed = postponed || connection->postponed;
    }
    if (::poll(waits.data(), waits.size(), postponed ? kPostponedMs : -1) < 0) continue;  // EINTR, or short of memory: try again
    if (waits[0].revents != 0) return;
    for (std::size_t i = 2; i < waits.size(); ++i) {
      Connection& connection = *connections_[i - 2];
      if (waits[i].revents & (POLLIN | POLLERR | POLLHUP))
        connection.receive(*this);
      else if (connection.postponed)
        connection.understand(*this);
      if (connection.state != Connection::State::closed && connection.wants_to_send()) connection.send();
    }
    std::erase_if(connections_, [](const auto& connection) { return connection->state == Connection::State::closed; });
    if (waits[1].revents != 0) accept_waiting();
  }
}

}  // namespace unshard
