// How a HostGroup comes about: threads of a process, processes of a host, a subset of a group.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "comm/futex.h"
#include "comm/host_group_internal.h"
#include "unshard/core/error.h"

namespace unshard::comm {

namespace {

std::shared_ptr<MemfdSegment> make_control(int size) {
  const std::size_t bytes = ControlBlock::bytes(size);
  return MemfdSegment::create("control", bytes, bytes, Backing::allocated);
}

}  // namespace

std::vector<std::shared_ptr<HostGroupImpl>> threads_group(int size, const HostGroupOptions& options, const Names& names,
                                                          const Family& family) {
  require(size >= 1, "[comm.in_process] size ", size, "; at least 1");
  const auto control = make_control(size);
  const auto share = std::make_shared<InProcessShare>();
  std::vector<std::shared_ptr<HostGroupImpl>> handles;
  for (int rank = 0; rank < size; ++rank)
    handles.push_back(std::make_shared<HostGroupImpl>(
        HostGroupImpl::Parts{rank, size, options, control, {}, {}, share, names, family.control, family.ranks}));
  return handles;
}

std::shared_ptr<HostGroupImpl> processes_group(int rank, int size, const HostGroup::Exchange& exchange, const HostGroupOptions& options,
                                               const Names& names, const Family& family) {
  require(size >= 1 && rank >= 0 && rank < size, "[comm.connect] rank ", rank, " of ", size);
  HostGroupImpl::Parts parts{rank, size, options, nullptr, {}, {}, nullptr, names, family.control, family.ranks};
  const auto name = [&](int r) { return names.ranks.empty() ? r : names.ranks[static_cast<std::size_t>(r)]; };
  std::optional<FdListener> listener;
  if (rank == 0) listener.emplace();
  const auto cards = exchange(cat(::getpid(), " ", listener ? listener->name() : "-"));
  require(static_cast<int>(cards.size()) == size, "[comm.connect] exchange returned ", cards.size(), " strings for ", size, " ranks");
  std::vector<int> pids;
  for (const auto& card : cards) pids.push_back(std::atoi(card.c_str()));
  parts.watch = PeerWatch(pids, names.ranks);

  const std::int64_t started = monotonic_ns();
  const auto check = [&] {
    for (int peer : parts.watch.dead())
      throw CommError(cat("[comm.connect] rank ", name(peer), " (pid ", pids[static_cast<std::size_t>(peer)], ") is gone; this is rank ",
                          name(rank), ", setting up shared memory"));
    if (options.interrupt_check) options.interrupt_check();
    if (static_cast<double>(monotonic_ns() - started) * 1e-9 > options.timeout.count())
      throw CommError(
          cat("[comm.connect] not every rank of this host came within ", options.timeout.count(), " s; this is rank ", name(rank)));
  };
  if (rank == 0) {
    parts.control = make_control(size);
    parts.channel = FdChannel::accept_all(*listener, size, check);
    parts.channel.send_to_all(parts.control->fd());
  } else {
    parts.channel = FdChannel::connect_to(cards[0].substr(cards[0].find(' ') + 1), rank);
    parts.control = MemfdSegment::map(parts.channel.receive(check), "control", ControlBlock::bytes(size));
  }
  auto group = std::make_shared<HostGroupImpl>(std::move(parts));
  group->barrier("connect");  // from here on every rank's block is filled in
  return group;
}

std::shared_ptr<HostGroupImpl> HostGroupImpl::subset(const std::vector<int>& ranks, const Names& names) {
  check_member("subset");
  const auto self = std::find(ranks.begin(), ranks.end(), rank_);
  const int new_rank = self == ranks.end() ? -1 : static_cast<int>(self - ranks.begin());
  Family family{family_ ? family_ : control_segment_, ranks};
  if (family_)
    for (int& rank : family.ranks) rank = family_ranks_[static_cast<std::size_t>(rank)];
  if (share_) {
    if (ranks.empty()) return nullptr;
    if (rank_ == 0) share_->group = threads_group(static_cast<int>(ranks.size()), options_, names, family);
    barrier("subgroup");
    auto handle = new_rank < 0 ? nullptr : share_->group[static_cast<std::size_t>(new_rank)];
    barrier("subgroup");
    if (rank_ == 0) share_->group.clear();
    return handle;
  }
  const auto among_members = [&](const std::string& mine) {
    const auto all = all_gather_strings(mine, "subgroup");
    std::vector<std::string> members;
    for (int rank : ranks) members.push_back(all[static_cast<std::size_t>(rank)]);
    return members;
  };
  if (new_rank >= 0) return processes_group(new_rank, static_cast<int>(ranks.size()), among_members, options_, names, family);
  among_members("");  // the gather is collective over the whole group
  return nullptr;
}

}  // namespace unshard::comm

namespace unshard {

std::vector<std::shared_ptr<HostGroup>> HostGroup::in_process(int size, const HostGroupOptions& options) {
  const auto handles = comm::threads_group(size, options);
  return {handles.begin(), handles.end()};
}

std::shared_ptr<HostGroup> HostGroup::connect(int rank, int size, const Exchange& exchange, const HostGroupOptions& options) {
  return comm::processes_group(rank, size, exchange, options);
}

}  // namespace unshard
