// How ranks of several processes become a communicator.
#include "comm/assemble.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <set>
#include <sstream>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/communicator_impl.h"
#include "comm/first_line.h"
#include "comm/gloo_group.h"
#include "comm/host_identity.h"
#include "comm/own_address.h"
#include "comm/roll_call.h"
#include "unshard/comm/run_record.h"

namespace unshard::comm {

HostGroupOptions host_options(const CommOptions& options) {
  HostGroupOptions host{options.timeout, options.interrupt_check, options.collective_check, {}};
  if (options.record) host.on_failure = [record = options.record](std::string_view error) { record->fail(error); };
  return host;
}

namespace {

/// What every rank says about its process before anything is set up.
struct Card {
  std::string host, address;
  int pid = 0;
  bool share = true;
  std::string name = {};  ///< the host's, for people: one word

  std::string text() const { return cat(share ? "share " : "apart ", pid, " ", address, " ", name, " ", host); }
  std::string place() const { return cat(name, ", ", address); }
  static Card parse(const std::string& text) {
    Card card;
    std::istringstream words(text);
    std::string share;
    words >> share >> card.pid >> card.address >> card.name;
    std::getline(words, card.host);
    card.share = share == "share";
    return card;
  }
};

std::string host_word(std::string name) {
  char own[256] = {};
  if (name.empty() && ::gethostname(own, sizeof(own) - 1) == 0) name = own;
  std::replace_if(
      name.begin(), name.end(), [](unsigned char letter) { return letter <= ' '; }, '_');
  return name.empty() ? "?" : name;
}

using Exchange = HostGroup::Exchange;

std::vector<Card> exchange_cards(const Exchange& exchange, const CommOptions& options) {
  Card mine{host_identity(options.host_name), own_address(), ::getpid(), options.share_memory, host_word(options.host_name)};
  std::vector<Card> cards;
  for (const auto& text : exchange(mine.text())) cards.push_back(Card::parse(text));
  return cards;
}

/// Where one rank doesn't share, none does: each is a host of its own.
bool all_share(const std::vector<Card>& cards) {
  return std::all_of(cards.begin(), cards.end(), [](const Card& card) { return card.share; });
}

/// Where one rank doesn't share, each is a host of its own.
HostMap map_hosts(const std::vector<Card>& cards) {
  std::vector<std::string> names;
  for (const Card& card : cards) names.push_back(all_share(cards) ? card.host : cat(names.size()));
  return HostMap(names);
}

PeerWatch watch_same_host(const std::vector<Card>& cards, int rank) {
  std::vector<int> pids;
  for (const Card& card : cards) pids.push_back(card.host == cards[static_cast<std::size_t>(rank)].host ? card.pid : 0);
  return PeerWatch(pids);
}

/// The ranks of this host. Collective over all ranks.
std::shared_ptr<HostGroupImpl> connect_host(const Exchange& exchange, const HostMap& map, int rank, const CommOptions& options) {
  const auto& here = map.neighbours(rank);
  const auto among_neighbours = [&](const std::string& mine) {
    const auto all = exchange(mine);
    std::vector<std::string> theirs;
    for (int neighbour : here) theirs.push_back(all[static_cast<std::size_t>(neighbour)]);
    return theirs;
  };
  return processes_group(map.local[static_cast<std::size_t>(rank)], static_cast<int>(here.size()), among_neighbours, host_options(options),
                         {here, map.world_size()});
}

/// Ranks of other machines can't connect to a loopback address.
void check_addresses(const std::vector<Card>& cards) {
  std::set<std::string> machines;
  for (const Card& card : cards) machines.insert(machine_of(card.host));
  if (machines.size() < 2 || machines.count("") > 0) return;
  for (std::size_t rank = 0; rank < cards.size(); ++rank)
    if (is_loopback(cards[rank].address))
      throw CommError(cat("[comm.connect] rank ", rank, "'s machine is known to itself as ", cards[rank].address,
                          " only, where ranks of other machines can't reach it; set GLOO_SOCKET_IFNAME there to the network interface to "
                          "use (`ip address` lists them), or give its name an address in /etc/hosts"));
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

/// Where ranks stand in the roll call while they say something to all.
Exchange exchange_at(RollCall& roll, const char* where) {
  return [&roll, where](const std::string& mine) { return roll.exchange(mine, where); };
}

/// A rank that ended before it came here is waited for by the roll call until the time-out; a group that is there notices by its
/// connections.
void meet_over(const c10::intrusive_ptr<c10d::ProcessGroup>& group, int rank, int size, std::chrono::duration<double> timeout,
               const std::function<void()>& check) {
  C10dTransport transport(group, rank, size, C10dOptions{timeout, check, {}, {}});
  at::Tensor all = at::empty({size}, at::kByte);
  transport.all_gather({"make_communicator", "the meeting", 0}, all, at::zeros({1}, at::kByte));
}

std::shared_ptr<Communicator> assemble(RollCall& roll, CommunicatorImpl::Parts parts, c10::intrusive_ptr<c10d::ProcessGroup> group) {
  const auto& options = parts.options;
  const int rank = parts.rank;
  const auto check = [&] {
    if (options.interrupt_check) options.interrupt_check();
    roll.check();
  };
  if (group && group->hasBackendForDeviceType(c10::DeviceType::CPU)) meet_over(group, rank, parts.size, options.timeout, check);
  if (group && is_plain_gloo(*group)) group = nullptr;
  const auto cards = exchange_cards(exchange_at(roll, "'who takes part'"), options);
  check_addresses(cards);
  parts.map = map_hosts(cards);
  if (all_share(cards)) parts.local = connect_host(exchange_at(roll, "'shared memory'"), parts.map, rank, options);
  if (!parts.local || parts.map.hosts() > 1) {
    std::unique_ptr<RemoteWatch> remote;
    if (parts.map.hosts() > 1)
      remote = RemoteWatch::connect(parts.map, rank, cards[static_cast<std::size_t>(rank)].address,
                                    exchange_at(roll, "'connections to other hosts'"), check);
    std::vector<std::string> places;
    for (const Card& card : cards) places.push_back(card.place());
    parts.health = std::make_shared<PeerHealth>(watch_same_host(cards, rank), std::move(remote), rank, std::move(places));
    roll.set_place("'connections for collectives'");
    if (!group)
      group = make_gloo_group(c10::make_intrusive<c10d::PrefixStore>("unshard/gloo", parts.store), rank, parts.size, options.timeout,
                              [&](double) { check(); });
  }
  parts.group = std::move(group);
  roll.set_place("'staging memory'");
  auto communicator = std::make_shared<CommunicatorImpl>(std::move(parts));
  roll.finish();
  return communicator;
}

/// Who is missing, and then the error of somebody else's making that says nothing of it.
std::string with_the_missing(const RollCall& roll, std::string_view place, std::string_view own, const std::exception& error) {
  std::string who;
  try {
    who = roll.explain();
  } catch (const CommError& ended) {
    return cat(ended.what(), ": ", first_line(error.what()));
  }
  return cat("[comm.", place, "] ", who, who.empty() ? "" : "; ", own, ": ", first_line(error.what()));
}

}  // namespace

std::shared_ptr<Communicator> assemble(const std::string& place, int rank, int size, c10::intrusive_ptr<c10d::Store> store,
                                       c10::intrusive_ptr<c10d::ProcessGroup> group, const CommOptions& options) {
  CommunicatorImpl::Parts parts;
  parts.rank = rank;
  parts.size = size;
  parts.options = options;
  try {
    parts.store = ask_store(place, rank, size, options, [store, rank] { return own_keys(store, rank); });
  } catch (const c10::Error& error) {
    throw CommError(cat("[comm.", place,
                        "] the store fails: rank 0, which serves it unless the launcher does, has ended or can't be reached; "
                        "this is rank ",
                        rank, " of ", size, ": ", first_line(error.what())));
  }
  RollCall roll(parts.store, rank, size, {place, options.timeout, options.interrupt_check});
  const auto failed = [&](const std::exception& error) {
    const std::string text = with_the_missing(roll, place, cat("this is rank ", rank, " of ", size), error);
    roll.fail(text);
    return CommError(text);
  };
  try {
    return assemble(roll, std::move(parts), std::move(group));
  } catch (const RollCallError& error) {
    roll.fail(error.what());
    throw;
  } catch (const std::runtime_error& error) {  // Gloo's too
    throw failed(error);
  } catch (const c10::Error& error) {
    throw failed(error);
  }
}

}  // namespace unshard::comm
