#include "zero/shard_service.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <random>

#include "unshard/comm/communicator.h"
#include "unshard/core/error.h"
#include "zero/shard_peer.h"
#include "zero/shard_pull.h"
#include "zero/shard_server.h"
#include "zero/shard_service_internal.h"

// [Note: why TCP of our own and not Gloo] A one-sided read needs what point-to-point of a collective library lacks: requests from ranks
// that nobody expects, from several threads at once, of any size (also none, also above 2 GiB), a serving thread that can be ended while it
// waits, and to hear at once that a peer died. A connection gives all of it: poll waits for many, its close names the dead peer, nothing is
// matched by tags, and no rank's failure disturbs the reads between others. It also works beside any backend (NCCL has no CPU tensors).
namespace unshard {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kAskedAfter{1};  // without a byte: then whether ranks have ended

/// One connection to every peer, used by one fetch at a time. Concurrent fetches use a lane each, so a large one delays no small one.
struct Lane {
  std::vector<net::Descriptor> sockets;  // by rank; empty until needed
};

class TcpShardService final : public ShardService {
 public:
  TcpShardService(int rank, int world_size, const HostGroup::Exchange& exchange, Lookup lookup, const ShardWait& wait,
                  const std::vector<int>& nearby);
  void fetch(const std::vector<Request>& requests) override;
  std::int64_t bytes_received() const override { return bytes_received_.load(std::memory_order_relaxed); }
  std::int64_t bytes_sent() const override { return server_->bytes_sent(); }

 private:
  std::unique_ptr<Lane> take_lane();
  std::vector<ShardPull> plan(const std::vector<Request>& requests, Lane& lane);
  void drive(std::vector<ShardPull>& pulls);
  void check_alive(const ShardPeer& peer, short revents) const;
  void check_still(const ShardPull& waiting, Clock::duration still) const;
  std::string with_cause(const std::string& error) const;

  const int rank_, world_size_, process_ = ::getpid();
  const ShardWait wait_;
  std::vector<bool> asked_;  // by rank: it is one whose pieces are read
  wire::Secret secret_{};
  std::vector<ShardPeer> peers_;              // by rank, own included
  std::mutex mutex_;                          // guards lanes_
  std::vector<std::unique_ptr<Lane>> lanes_;  // idle ones
  std::atomic<std::int64_t> bytes_received_{0};
  std::unique_ptr<ShardServer> server_;  // last: stops first
};

wire::Secret random_secret() {
  wire::Secret secret;
  std::random_device random;
  for (auto& byte : secret) byte = static_cast<std::uint8_t>(random());
  return secret;
}

TcpShardService::TcpShardService(int rank, int world_size, const HostGroup::Exchange& exchange, Lookup lookup, const ShardWait& wait,
                                 const std::vector<int>& nearby)
    : rank_(rank), world_size_(world_size), wait_(wait), asked_(static_cast<std::size_t>(world_size), true) {
  asked_[static_cast<std::size_t>(rank)] = false;
  for (const int peer : nearby) asked_[static_cast<std::size_t>(peer)] = false;
  // First who is where, with rank 0's secret for all; then, with every server up, the ports.
  const auto proposal = random_secret();
  const auto places = exchange(net::network_identity() + '\n' + std::string(proposal.begin(), proposal.end()));
  const auto host_of = [](const std::string& place) { return place.substr(0, place.find('\n')); };
  const bool one_host = std::all_of(places.begin(), places.end(), [&](const auto& place) { return host_of(place) == host_of(places[0]); });
  const auto secret_at = places[0].find('\n') + 1;
  UNSHARD_DCHECK(places[0].size() == secret_at + secret_.size(), "secret of ", places[0].size() - secret_at, " bytes");
  std::memcpy(secret_.data(), places[0].data() + secret_at, secret_.size());

  auto listener = net::listen(one_host);
  const int port = listener.port;
  server_ = std::make_unique<ShardServer>(rank, std::move(listener), secret_, std::move(lookup), wait.timeout);
  const auto cards = exchange(ShardPeer::card(port, one_host ? std::vector<std::string>{} : net::own_addresses()));
  for (int peer = 0; peer < world_size; ++peer) peers_.emplace_back(rank, peer, cards[peer]);

  // Reaching everyone now turns a closed port into an error at the start, on all ranks, instead of one in the middle of a step.
  std::string problem;
  try {
    auto lane = std::make_unique<Lane>();
    lane->sockets.resize(world_size);
    for (auto& peer : peers_) {
      if (!asked_[static_cast<std::size_t>(peer.rank())]) continue;
      std::size_t used = 0;
      lane->sockets[peer.rank()] = peer.connect(secret_, wait_, &used);
      peer.prefer(used);
    }
    lanes_.push_back(std::move(lane));
  } catch (const CommError& error) {
    problem = error.what();
  }
  const auto problems = exchange(problem);
  for (int peer = 0; peer < world_size; ++peer)
    if (!problems[peer].empty()) throw CommError(cat("[zero.shards] on rank ", peer, ": ", problems[peer]));
}

std::unique_ptr<Lane> TcpShardService::take_lane() {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<Lane> lane;
  if (!lanes_.empty()) {
    lane = std::move(lanes_.back());
    lanes_.pop_back();
  } else {
    lane = std::make_unique<Lane>();
    lane->sockets.resize(world_size_);
  }
  return lane;
}

std::vector<ShardPull> TcpShardService::plan(const std::vector<Request>& requests, Lane& lane) {
  std::vector<ShardPull> pulls;
  for (int step = 1; step < world_size_; ++step) {
    const int peer = (rank_ + step) % world_size_;  // every rank starts with another one
    if (!asked_[static_cast<std::size_t>(peer)]) continue;
    std::vector<std::pair<int, std::span<std::byte>>> wanted;
    for (const auto& request : requests) {
      const std::size_t begin = std::min(request.numel_bytes, peer * request.shard_bytes);
      const std::size_t end = std::min(request.numel_bytes, (peer + 1) * request.shard_bytes);
      if (begin < end) wanted.emplace_back(request.id, std::span(request.whole + begin, end - begin));
    }
    if (wanted.empty()) continue;
    if (!lane.sockets[peer]) lane.sockets[peer] = peers_[peer].connect(secret_, wait_);
    auto& pull = pulls.emplace_back(peer, lane.sockets[peer].get());
    for (const auto& [id, destination] : wanted) pull.want(id, destination);
  }
  return pulls;
}

void TcpShardService::fetch(const std::vector<Request>& requests) {
  require(::getpid() == process_, "[zero.fetch] a forked child of rank ", rank_,
          " can't read other ranks' parameters; use the spawn start method, ", "or read them before the fork");
  for (const auto& request : requests)
    require(request.shard_bytes * world_size_ >= request.numel_bytes, "[zero.fetch] parameter ", request.id, ": ", world_size_,
            " pieces of ", request.shard_bytes, " bytes don't make ", request.numel_bytes);
  try {
    auto lane = take_lane();
    auto pulls = plan(requests, *lane);
    drive(pulls);
    for (const auto& pull : pulls) bytes_received_.fetch_add(pull.payload_bytes(), std::memory_order_relaxed);
    // Only a lane whose answers were read to the end may serve again; any exception closes it with its destructor.
    const std::lock_guard lock(mutex_);
    lanes_.push_back(std::move(lane));
  } catch (const CommError& error) {
    throw CommError(cat("[zero.fetch] on rank ", rank_, ": ", with_cause(error.what())));
  }
}

// The peer that was asked may have ended because of another one.
std::string TcpShardService::with_cause(const std::string& error) const {
  const auto known = wait_.who_ended();
  const auto fact = known.substr(0, known.find(" ("));  // "rank 2 is gone"
  return known.empty() || error.find(fact) != std::string::npos ? error : cat(known, "; ", error);
}

void TcpShardService::check_alive(const ShardPeer& peer, short revents) const {
  if (revents & POLLIN) throw CommError(peer.obituary());
}

// Sockets and, on one host, the peers' processes: a forked child of a dead rank may hold its connections open.
void TcpShardService::drive(std::vector<ShardPull>& pulls) {
  std::vector<pollfd> waits;
  auto progress = Clock::now();
  for (;;) {
    waits.clear();
    for (const auto& pull : pulls) {
      waits.push_back({pull.done() ? -1 : pull.socket(), pull.events(), 0});
      waits.push_back({pull.done() ? -1 : peers_[pull.rank()].process_descriptor(), POLLIN, 0});
    }
    const auto waiting = std::find_if(pulls.begin(), pulls.end(), [](const auto& pull) { return !pull.done(); });
    if (waiting == pulls.end()) return;
    std::size_t moved = 0;
    if (::poll(waits.data(), waits.size(), kWaitSliceMs) > 0) {
      for (std::size_t i = 0; i < pulls.size(); ++i) {
        if (waits[2 * i].revents == 0) {
          check_alive(peers_[pulls[i].rank()], waits[2 * i + 1].revents);  // nothing left to read from it, and nothing will come
          continue;
        }
        moved += pulls[i].advance();
      }
    }
    if (moved > 0) {
      progress = Clock::now();
      if (wait_.moved) wait_.moved->fetch_add(1, std::memory_order_relaxed);
    }
    if (wait_.interrupt_check) wait_.interrupt_check();
    check_still(*waiting, Clock::now() - progress);
  }
}

// A peer whose host went without a word sends nothing, and its connection stays open: whether it has ended is known elsewhere.
void TcpShardService::check_still(const ShardPull& waiting, Clock::duration still) const {
  if (still > wait_.timeout) {
    const auto known = wait_.describe ? wait_.describe(waiting.rank()) : std::string();
    throw CommError(cat("rank ", waiting.rank(), " gives no sign of life: it has sent nothing for ", wait_.timeout.count(), " s while ",
                        waiting.position(), " was read from it",
                        known.empty() ? " (is it stopped, overloaded or cut off?)" : cat(": ", known)));
  }
  if (still < kAskedAfter || !wait_.ended) return;
  if (const auto ended = wait_.ended(); !ended.empty())
    throw CommError(cat(ended, "; nothing comes from rank ", waiting.rank(), ", from which ", waiting.position(), " is read"));
}

/// A world of one has nobody to ask.
class NoPeersService final : public ShardService {
 public:
  void fetch(const std::vector<Request>&) override {}
  std::int64_t bytes_received() const override { return 0; }
  std::int64_t bytes_sent() const override { return 0; }
};

}  // namespace

std::unique_ptr<ShardService> start_shard_service(int rank, int world_size, const HostGroup::Exchange& exchange,
                                                  ShardService::Lookup lookup, const ShardWait& wait, const std::vector<int>& nearby) {
  if (world_size == 1) return std::make_unique<NoPeersService>();
  return std::make_unique<TcpShardService>(rank, world_size, exchange, std::move(lookup), wait, nearby);
}

std::unique_ptr<ShardService> ShardService::start(Communicator& comm, Lookup lookup, const std::vector<int>& nearby,
                                                  std::atomic<std::uint64_t>* moved) {
  const auto exchange = [&comm](const std::string& mine) { return comm.all_gather_strings(mine); };
  const auto& options = comm.options();
  const ShardWait wait{options.timeout, options.interrupt_check, comm.watch_for_ends(), comm.watch_ranks(), moved};
  return start_shard_service(comm.rank(), comm.world_size(), exchange, std::move(lookup), wait, nearby);
}

}  // namespace unshard
