// How communicators come about.
#include "unshard/comm/communicator.h"

#include <ATen/DeviceAccelerator.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/communicator_impl.h"
#include "comm/first_line.h"
#include "comm/gloo_group.h"
#include "comm/host_identity.h"
#include "comm/launch_env.h"
#include "comm/own_address.h"
#include "comm/store_exchange.h"
#include "comm/text_exchange.h"
#include "unshard/comm/run_record.h"
#include "unshard/core/error.h"

namespace unshard {

using comm::CommunicatorImpl;

namespace {

HostGroupOptions host_options(const CommOptions& options) {
  HostGroupOptions host{options.timeout, options.interrupt_check, options.collective_check, {}};
  if (options.record) host.on_failure = [record = options.record](std::string_view error) { record->fail(error); };
  return host;
}

/// What every rank says about its process before anything is set up.
struct Card {
  std::string host;
  int pid = 0;
  bool share = true;

  std::string text() const { return cat(share ? "share " : "apart ", pid, " ", host); }
  static Card parse(const std::string& text) {
    Card card;
    card.share = text.starts_with("share ");
    card.pid = std::atoi(text.c_str() + 6);
    card.host = text.substr(std::min(text.size(), text.find(' ', 6)));
    return card;
  }
};

using Exchange = HostGroup::Exchange;

std::vector<Card> exchange_cards(const Exchange& exchange, const CommOptions& options) {
  Card mine{comm::host_identity(options.host_name), ::getpid(), options.share_memory};
  std::vector<Card> cards;
  for (const auto& text : exchange(mine.text())) cards.push_back(Card::parse(text));
  return cards;
}

/// Where one rank doesn't share, none does: each is a host of its own.
bool all_share(const std::vector<Card>& cards) {
  return std::all_of(cards.begin(), cards.end(), [](const Card& card) { return card.share; });
}

/// By where ranks really are, shared memory or not.
comm::HostMap map_machines(const std::vector<Card>& cards) {
  std::vector<std::string> names;
  for (const Card& card : cards) names.push_back(card.host);
  return comm::HostMap(names);
}

comm::HostMap map_hosts(const std::vector<Card>& cards) {
  std::vector<std::string> names;
  for (const Card& card : cards) names.push_back(all_share(cards) ? card.host : cat(names.size()));
  return comm::HostMap(names);
}

comm::PeerWatch watch_same_host(const std::vector<Card>& cards, int rank) {
  std::vector<int> pids;
  for (const Card& card : cards) pids.push_back(card.host == cards[static_cast<std::size_t>(rank)].host ? card.pid : 0);
  return comm::PeerWatch(pids);
}

/// The ranks of this host. Collective over all ranks.
std::shared_ptr<comm::HostGroupImpl> connect_host(const Exchange& exchange, const comm::HostMap& map, int rank,
                                                  const CommOptions& options) {
  const auto& here = map.neighbours(rank);
  const auto among_neighbours = [&](const std::string& mine) {
    const auto all = exchange(mine);
    std::vector<std::string> theirs;
    for (int neighbour : here) theirs.push_back(all[static_cast<std::size_t>(neighbour)]);
    return theirs;
  };
  return comm::processes_group(map.local[static_cast<std::size_t>(rank)], static_cast<int>(here.size()), among_neighbours,
                               host_options(options), {here, map.world_size()});
}

/// One store may serve several communicators, made one after the other by all ranks: each gets keys of its own, by a count a rank.
c10::intrusive_ptr<c10d::Store> own_keys(const c10::intrusive_ptr<c10d::Store>& store, int rank) {
  const auto generation = store->add(cat("unshard/communicators/", rank), 1);
  return c10::make_intrusive<c10d::PrefixStore>(cat("unshard/", generation), store);
}

/// Where all tensors are the CPU's, a Gloo group of torch's is let go: the engine's messages get connections of their own, so that they
/// never mix with the program's collectives, and the program's destroy_process_group() really ends the group and its threads.
bool is_plain_gloo(c10d::ProcessGroup& group) {
  if (at::accelerator::deviceCount() > 0) return false;
  return group.hasBackendForDeviceType(c10::DeviceType::CPU) && group.getBackend(c10::DeviceType::CPU)->getBackendName() == "gloo";
}

/// How ranks speak while they are set up: over the group that is there, where a rank that dies is noticed by its connection, else through
/// the store.
Exchange make_exchange(int rank, int size, const c10::intrusive_ptr<c10d::Store>& store,
                       const c10::intrusive_ptr<c10d::ProcessGroup>& group, const CommOptions& options) {
  if (group && group->hasBackendForDeviceType(c10::DeviceType::CPU)) {
    const auto transport =
        std::make_shared<comm::C10dTransport>(group, rank, size, comm::C10dOptions{options.timeout, options.interrupt_check, {}, {}});
    return [transport, size](const std::string& mine) {
      return comm::exchange_texts(*transport, {"make_communicator", "who takes part", 0}, mine, size);
    };
  }
  comm::StoreRules rules{options.timeout, {}};
  if (options.interrupt_check) rules.check = [check = options.interrupt_check](std::string_view) { check(); };
  const auto over_store = std::make_shared<comm::StoreExchange>(store, "init", rank, size, std::move(rules));
  return [over_store](const std::string& mine) { return over_store->all_gather(mine, "init_process_group"); };
}

/// `group` may be null: then Gloo is set up unless shared memory serves.
std::shared_ptr<Communicator> assemble(int rank, int size, c10::intrusive_ptr<c10d::Store> store,
                                       c10::intrusive_ptr<c10d::ProcessGroup> group, const CommOptions& options) {
  store = own_keys(store, rank);
  const auto exchange = make_exchange(rank, size, store, group, options);
  if (group && is_plain_gloo(*group)) group = nullptr;
  const auto cards = exchange_cards(exchange, options);
  CommunicatorImpl::Parts parts;
  parts.rank = rank;
  parts.size = size;
  parts.options = options;
  parts.store = store;
  parts.map = map_hosts(cards);
  if (all_share(cards)) parts.local = connect_host(exchange, parts.map, rank, options);
  if (!parts.local || parts.map.hosts() > 1) {
    const comm::HostMap machines = map_machines(cards);
    std::unique_ptr<comm::RemoteWatch> remote;
    if (machines.hosts() > 1) remote = comm::RemoteWatch::connect(machines, rank, comm::own_address(), exchange, options.interrupt_check);
    parts.health = std::make_shared<comm::PeerHealth>(watch_same_host(cards, rank), std::move(remote));
    if (!group) group = comm::make_gloo_group(c10::make_intrusive<c10d::PrefixStore>("unshard/gloo", store), rank, size, options.timeout);
  }
  parts.group = std::move(group);
  return std::make_shared<CommunicatorImpl>(std::move(parts));
}

/// The store's server answers ranks that may have died: a broken connection is an error there, not the end of this process. (Python ignores
/// the signal anyway; a program's own handler stays.)
void ignore_broken_pipes() {
  struct sigaction now {};
  if (::sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) ::signal(SIGPIPE, SIG_IGN);
}

c10::intrusive_ptr<c10d::Store> make_store(const comm::LaunchEnv& env, const CommOptions& options) {
  if (env.rank == 0) ignore_broken_pipes();
  c10d::TCPStoreOptions store_options;
  store_options.port = env.port;
  store_options.isServer = env.rank == 0 && !env.store_exists;
  store_options.numWorkers = static_cast<std::size_t>(env.world_size);
  store_options.waitWorkers = false;  // who is missing is said by the first exchange
  store_options.timeout = std::min(comm::to_milliseconds(options.timeout), std::chrono::milliseconds(300'000));
  try {
    const auto store = c10::make_intrusive<c10d::TCPStore>(env.address, store_options);
    return c10::make_intrusive<c10d::PrefixStore>(cat("unshard/", env.store_prefix), store);
  } catch (const std::exception& error) {
    throw CommError(cat("[comm.init_process_group] rank ", env.rank, " can't ",
                        store_options.isServer ? "serve the store at " : "reach the store at ", env.address, ":", env.port,
                        " (MASTER_ADDR, MASTER_PORT): ", comm::first_line(error.what())));
  }
}

}  // namespace

std::shared_ptr<Communicator> single_process_communicator(const CommOptions& options) {
  CommunicatorImpl::Parts parts;
  parts.options = options;
  if (options.share_memory) parts.local = comm::threads_group(1, host_options(options))[0];
  return std::make_shared<CommunicatorImpl>(std::move(parts));
}

std::shared_ptr<Communicator> init_process_group(const CommOptions& given, const std::string& backend) {
  require(backend.empty() || backend == "gloo", "[comm.init_process_group] backend '", backend,
          "'; this build has gloo. For NCCL create the group with torch.distributed and pass it to make_communicator");
  const auto env = comm::read_launch_env(comm::process_env);
  CommOptions options = given;
  if (!options.record) {
    RunRecordOptions recording;
    recording.rank = env.rank;
    recording.world_size = env.world_size;
    options.record = RunRecord::from_environment(recording);
  }
  if (env.world_size == 1) return single_process_communicator(options);
  try {
    return assemble(env.rank, env.world_size, make_store(env, options), {}, options);
  } catch (const c10::Error& error) {
    throw CommError(cat("[comm.init_process_group] rank ", env.rank, " of ", env.world_size, ": ", comm::first_line(error.what())));
  }
}

std::shared_ptr<Communicator> make_communicator(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::intrusive_ptr<c10d::Store> store,
                                                const CommOptions& options) {
  require(group && store, "[comm.make_communicator] a null ", group ? "store" : "group");
  const int rank = group->getRank(), size = group->getSize();
  if (size == 1) return single_process_communicator(options);
  try {
    return assemble(rank, size, std::move(store), std::move(group), options);
  } catch (const c10::Error& error) {
    throw CommError(cat("[comm.make_communicator] rank ", rank, " of ", size, ": ", comm::first_line(error.what())));
  }
}

namespace {

/// Threads of this process as the ranks of `map`'s hosts. `share`: memory is shared inside a host.
std::vector<std::shared_ptr<Communicator>> threads(const comm::HostMap& map, const CommOptions& options, bool share) {
  const int size = map.world_size();
  std::vector<std::shared_ptr<Communicator>> all(static_cast<std::size_t>(size));
  if (size == 1) return {single_process_communicator(options)};
  std::vector<std::vector<std::shared_ptr<comm::HostGroupImpl>>> groups;
  for (const auto& ranks : map.ranks)
    if (share) groups.push_back(comm::threads_group(static_cast<int>(ranks.size()), host_options(options), {ranks, size}));
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::exception_ptr> errors(all.size());
  const auto make = [&](int rank) {
    const auto at = static_cast<std::size_t>(rank);
    try {
      CommunicatorImpl::Parts parts;
      parts.rank = rank;
      parts.size = size;
      parts.options = options;
      parts.loopback = true;
      parts.store = store;
      parts.map = map;
      if (share) parts.local = groups[static_cast<std::size_t>(map.host[at])][static_cast<std::size_t>(map.local[at])];
      if (!share || map.hosts() > 1)
        parts.group = comm::make_loopback_group(c10::make_intrusive<c10d::PrefixStore>("unshard/gloo", store), rank, size, options.timeout);
      all[at] = std::make_shared<CommunicatorImpl>(std::move(parts));
    } catch (...) {
      errors[at] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;  // setting up is collective
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(make, rank);
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors)
    if (error) std::rethrow_exception(error);
  return all;
}

}  // namespace

std::vector<std::shared_ptr<Communicator>> in_process_communicators(int world_size, const CommOptions& options) {
  require(world_size >= 1, "[comm.in_process_communicators] world_size ", world_size, "; at least 1");
  if (options.share_memory) return threads(comm::blocks_of_ranks({world_size}), options, true);
  return threads(comm::blocks_of_ranks(std::vector<int>(static_cast<std::size_t>(world_size), 1)), options, false);
}

std::vector<std::shared_ptr<Communicator>> in_process_hosts(const std::vector<int>& ranks_per_host, const CommOptions& options) {
  int world_size = 0;
  for (int ranks : ranks_per_host) {
    require(ranks >= 1, "[comm.in_process_hosts] a host of ", ranks, " ranks; at least 1");
    world_size += ranks;
  }
  require(world_size >= 1, "[comm.in_process_hosts] no host");
  if (!options.share_memory) return in_process_communicators(world_size, options);
  return threads(comm::blocks_of_ranks(ranks_per_host), options, true);
}

}  // namespace unshard
