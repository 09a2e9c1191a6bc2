// How fast are the shared-memory collectives? Forked ranks; each time is the slower rank's. Compared with plain memcpy, run by all ranks at
// the same time: `ratio` with one of 64 MiB, which main memory limits as it does gradients and parameters, `hot` with one of the same size,
// which for small sizes never leaves a core's cache, as no collective's bytes can.
// Usage: unshard_collectives_bench [ranks=2] [largest_bytes=67108864]
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "comm/communicator_impl.h"
#include "comm/testing.h"
#include "unshard/comm/communicator.h"

namespace {

using namespace unshard;
using Clock = std::chrono::steady_clock;

double median(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

/// Bytes read and written per second by memcpy of `bytes` (both ranks at the same time, as in a collective).
double memcpy_bandwidth(Communicator& comm, std::int64_t bytes) {
  std::vector<char> from(static_cast<std::size_t>(bytes), 1), to(static_cast<std::size_t>(bytes), 2);
  std::vector<double> times;
  for (int i = 0; i < 15; ++i) {
    comm.host()->barrier("memcpy");
    const auto start = Clock::now();
    std::memcpy(to.data(), from.data(), from.size());
    asm volatile("" ::"r"(to.data()) : "memory");
    times.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  return 2.0 * static_cast<double>(bytes) / median(times);
}

struct Operation {
  const char* name;
  double must_move;   ///< what a rank must read and write in any implementation, in units of `bytes`
  double bus_factor;  ///< busbw / algbw, as nccl-tests define it
  std::function<void(Communicator&)> run;
  at::Tensor result;
  double wanted;  ///< every element of result, after one run on ones
};

double time_of(Communicator& comm, const Operation& operation, int rounds) {
  std::vector<double> times;
  for (int i = 0; i < rounds; ++i) {
    comm.host()->barrier("bench");
    const auto start = Clock::now();
    operation.run(comm);
    times.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  double mine = median(times);
  std::vector<double> all(static_cast<std::size_t>(comm.world_size()));
  comm.host()->all_gather_small(&mine, sizeof(mine), all.data(), "bench");
  return *std::max_element(all.begin(), all.end());
}

/// `bytes` is the size of the whole (gathered, unreduced) tensor, as nccl-tests count it.
void bench_size(Communicator& comm, std::int64_t bytes, at::ScalarType dtype, double memory) {
  const double n = comm.world_size();
  const std::int64_t numel = bytes / static_cast<std::int64_t>(c10::elementSize(dtype)), part = numel / comm.world_size();
  at::Tensor whole = at::full({numel}, 1, dtype), other = at::full({numel}, 1, dtype), slice = at::full({part}, 1, dtype);
  const std::vector<Operation> operations{
      {"all_gather", 1 / n + 1, (n - 1) / n, [&](Communicator& c) { c.all_gather(other, slice); }, other, 1},
      {"reduce_scatter", 1 + 1 / n, (n - 1) / n, [&](Communicator& c) { c.reduce_scatter(slice, whole); }, slice, n},
      {"all_reduce", 2, 2 * (n - 1) / n, [&](Communicator& c) { c.all_reduce(whole); }, whole, n},
      {"broadcast", 1, 1, [&](Communicator& c) { c.broadcast(whole, 0); }, whole, 1},
      {"all_to_all", 2, (n - 1) / n, [&](Communicator& c) { c.all_to_all(other, whole); }, other, 1},
  };
  const double hot = memcpy_bandwidth(comm, bytes);
  const int rounds = bytes <= (1 << 20) ? 200 : 20;
  for (const Operation& operation : operations) {
    for (at::Tensor tensor : {whole, other, slice}) tensor.fill_(1);
    if (operation.result.is_same(other)) other.zero_();
    operation.run(comm);
    const auto wrong = operation.result.ne(operation.wanted).sum().item<std::int64_t>();
    time_of(comm, operation, 3);
    const double seconds = time_of(comm, operation, rounds);
    if (comm.rank() != 0) continue;
    const double algbw = static_cast<double>(bytes) / seconds * 1e-9, moved = operation.must_move * static_cast<double>(bytes) / seconds;
    std::printf("%-15s %10ld %6s %10.1f %9.2f %9.2f %6.2f %6.2f %6ld\n", operation.name, static_cast<long>(bytes), c10::toString(dtype),
                seconds * 1e6, algbw, algbw * operation.bus_factor, moved / memory, moved / hot, static_cast<long>(wrong));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 2;
  const std::int64_t largest = argc > 2 ? std::atoll(argv[2]) : 64 << 20;
  const unshard::testing::PipeExchange exchange(ranks);
  std::printf("# %d ranks, 1 thread each; ratio, hot = bytes a rank must read and write / time / memcpy bandwidth (64 MiB, same size)\n",
              ranks);
  std::printf("%-15s %10s %6s %10s %9s %9s %6s %6s %6s\n", "# op", "bytes", "dtype", "median_us", "algbw", "busbw", "ratio", "hot",
              "wrong");
  const auto exits = unshard::testing::fork_ranks(ranks, 300, [&](int rank) {
    at::set_num_threads(1);
    comm::CommunicatorImpl::Parts parts;
    parts.rank = rank;
    parts.size = ranks;
    parts.host = std::static_pointer_cast<comm::HostGroupImpl>(HostGroup::connect(rank, ranks, exchange.for_rank(rank)));
    comm::CommunicatorImpl communicator(std::move(parts));
    const double memory = memcpy_bandwidth(communicator, 64 << 20);
    if (rank == 0) std::printf("# memcpy of 64 MiB: %.2f GB/s read and written by each rank\n", memory * 1e-9);
    for (auto dtype : {at::kFloat, at::kBFloat16})
      for (std::int64_t bytes = 4096; bytes <= largest; bytes *= 4) bench_size(communicator, bytes, dtype, memory);
    return 0;
  });
  for (const auto& exit : exits)
    if (exit.code != 0) return 1;
  return 0;
}
