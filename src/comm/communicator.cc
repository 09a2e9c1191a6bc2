// How communicators come about.
#include "unshard/comm/communicator.h"

#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/assemble.h"
#include "comm/communicator_impl.h"
#include "comm/first_line.h"
#include "comm/gloo_group.h"
#include "comm/launch_env.h"
#include "unshard/comm/run_record.h"
#include "unshard/core/error.h"

namespace unshard {

using comm::CommunicatorImpl;

namespace {

const char* const kInit = "init_process_group";

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
                        " (MASTER_ADDR, MASTER_PORT)",
                        store_options.isServer ? ": " : "; rank 0 serves it, unless the launcher does: has it ended, or not come? ",
                        comm::first_line(error.what())));
  }
}

}  // namespace

std::shared_ptr<Communicator> single_process_communicator(const CommOptions& options) {
  CommunicatorImpl::Parts parts;
  parts.options = options;
  if (options.share_memory) parts.local = comm::threads_group(1, comm::host_options(options))[0];
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
    const auto store = comm::ask_store(kInit, env.rank, env.world_size, options, [env, options] { return make_store(env, options); });
    return comm::assemble(kInit, env.rank, env.world_size, store, {}, options);
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
    return comm::assemble("make_communicator", rank, size, std::move(store), std::move(group), options);
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
    if (share) groups.push_back(comm::threads_group(static_cast<int>(ranks.size()), comm::host_options(options), {ranks, size}));
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
