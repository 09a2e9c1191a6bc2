#pragma once
// For tests of the store: every world size in both memories, each parameter beside a dense twin.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "comm/testing.h"
#include "unshard/zero/parameter_store.h"

namespace unshard::testing {

struct World {
  int size;
  bool shared;                  ///< all ranks share memory
  std::vector<int> hosts = {};  ///< ranks on each of several hosts; else empty
};

inline World on_hosts(const std::vector<int>& ranks_per_host) {
  World world{0, false, ranks_per_host};
  for (const int ranks : ranks_per_host) world.size += ranks;
  return world;
}

inline std::string world_name(const ::testing::TestParamInfo<World>& info) {
  if (info.param.hosts.empty()) return std::to_string(info.param.size) + (info.param.shared ? "_shared" : "_private");
  std::string name = "hosts";
  for (const int ranks : info.param.hosts) name += "_" + std::to_string(ranks);
  return name;
}

inline CommOptions comm_options(const World& world, double timeout_s = 20) {
  CommOptions options;
  options.share_memory = world.shared || !world.hosts.empty();
  options.timeout = std::chrono::duration<double>(timeout_s);
  return options;
}

/// Small integers that depend on the seed: sums and products stay exact.
inline at::Tensor numbers(at::IntArrayRef sizes, std::int64_t seed, at::ScalarType dtype = at::kFloat) {
  std::int64_t numel = 1;
  for (const auto size : sizes) numel *= size;
  return ((at::arange(numel, at::kLong) * (seed * 2 + 3) + seed) % 11 - 5).reshape(sizes).to(dtype);
}

/// fn(rank, comm): as many ranks, on as many hosts, as the world has.
inline void run_world(const World& world, const std::function<void(int, Communicator&)>& fn) {
  world.hosts.empty() ? run_ranks(world.size, comm_options(world), fn) : run_hosts(world.hosts, comm_options(world), fn);
}

/// fn(rank, store): one store a rank; it is gone before its communicator.
inline void with_stores(const World& world, const StoreOptions& options,
                        const std::function<void(int, std::shared_ptr<ParameterStore>)>& fn) {
  run_world(world, [&](int rank, Communicator& comm) {
    const std::shared_ptr<Communicator> borrowed(std::shared_ptr<void>(), &comm);
    const auto store = ParameterStore::create(borrowed, options);
    fn(rank, store);
    comm.barrier("end of the test");  // peers may still read this rank's shards
  });
}
inline void with_stores(const World& world, const std::function<void(int, std::shared_ptr<ParameterStore>)>& fn) {
  with_stores(world, {}, fn);
}

/// The message of what `fn` throws; "" when it throws nothing.
inline std::string error_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

class EveryWorld : public ::testing::TestWithParam<World> {
 protected:
  void run(const std::function<void(int, std::shared_ptr<ParameterStore>)>& fn) { with_stores(GetParam(), fn); }
  void run(const StoreOptions& options, const std::function<void(int, std::shared_ptr<ParameterStore>)>& fn) {
    with_stores(GetParam(), options, fn);
  }
};

inline std::vector<World> every_world() {
  return {{1, true}, {2, true}, {3, true}, {2, false}, {3, false}, on_hosts({1, 1}), on_hosts({1, 2}), on_hosts({2, 2})};
}

#define UNSHARD_EVERY_WORLD(suite) \
  INSTANTIATE_TEST_SUITE_P(Worlds, suite, ::testing::ValuesIn(::unshard::testing::every_world()), ::unshard::testing::world_name)

}  // namespace unshard::testing
