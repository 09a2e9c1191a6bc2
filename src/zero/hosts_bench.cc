// How much of the time that parameters need to cross between hosts a step shows. Started as ranks on several hosts (RANK, WORLD_SIZE, ...):
//   unshard_hosts_bench [layers=16] [mib_per_layer=2] [compute_ms=20] [budget_mib=0: everything] [prefetch_mib=64] [steps=6]
// A layer's forward takes compute_ms, its backward twice as much. Rank 0 prints a line a step, of the slowest rank and of its host.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "unshard/comm/communicator.h"
#include "unshard/zero/parameter_store.h"

namespace {

using Clock = std::chrono::steady_clock;
double ms_since(Clock::time_point start) { return std::chrono::duration<double, std::milli>(Clock::now() - start).count(); }

double largest(unshard::Communicator& comm, double mine) {
  auto value = at::empty({1}, c10::kDouble);
  *value.mutable_data_ptr<double>() = mine;
  comm.all_reduce(value, unshard::ReduceOp::max);
  return *value.const_data_ptr<double>();
}

}  // namespace

int main(int argc, char** argv) {
  const auto argument = [&](int i, long otherwise) { return argc > i ? std::atol(argv[i]) : otherwise; };
  const long layers = argument(1, 16), mib = argument(2, 2), compute_ms = argument(3, 20), budget_mib = argument(4, 0);
  const auto comm = unshard::init_process_group();
  unshard::StoreOptions options;
  if (budget_mib > 0) options.max_live_numel = budget_mib << 18;
  options.prefetch_numel = argument(5, 64) << 18;
  const auto store = unshard::ParameterStore::create(comm, options);
  std::vector<at::Tensor> parameters;
  for (long i = 0; i < layers; ++i) {
    parameters.push_back(at::ones({mib << 18}));
    store->add(parameters.back(), "layer" + std::to_string(i), true);
  }
  store->settle();
  const auto use = [&](long i, long ms) {
    const auto begun = Clock::now();
    store->pin({static_cast<int>(i)});
    const double waited = ms_since(begun);
    std::this_thread::sleep_for(std::chrono::milliseconds(ms));
    store->unpin({static_cast<int>(i)});
    return waited;
  };
  for (long step = 0; step < argument(6, 6); ++step) {
    store->begin_step(step);
    const auto before = store->stats();
    const auto begun = Clock::now();
    double waited = 0;
    for (long i = 0; i < layers; ++i) waited += use(i, compute_ms);
    for (long i = layers; i-- > 0;) waited += use(i, 2 * compute_ms);
    const double compute = ms_since(begun);
    store->settle();
    for (long i = 0; i < layers; ++i) store->own_slice(static_cast<int>(i)).add_(1);
    store->publish(std::vector<std::uint8_t>(static_cast<std::size_t>(layers), 1));
    const double whole = largest(*comm, ms_since(begun)), slowest = largest(*comm, compute), most = largest(*comm, waited);
    const auto after = store->stats();
    if (comm->rank() == 0) {
      std::printf("step %ld: %.1f ms, forward and backward %.1f, waited %.1f (%.1f %%), rank 0 received %.1f MiB, peak %.1f MiB a host\n",
                  step, whole, slowest, most, 100 * most / slowest, static_cast<double>(after.link_bytes - before.link_bytes) / (1 << 20),
                  static_cast<double>(after.host_peak_live_bytes) / (1 << 20));
      std::fflush(stdout);
    }
  }
  comm->barrier("end");
  return 0;
}
