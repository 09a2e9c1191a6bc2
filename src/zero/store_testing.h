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
  bool shared;
};

inline std::string world_name(const ::testing::TestParamInfo<World>& info) {
  return std::to_string(info.param.size) + (info.param.shared ? "_shared" : "_private");
}

inline CommOptions comm_options(const World& world, double timeout_s = 20) {
  CommOptions options;
  options.share_memory = world.shared;
  options.timeout = std::chrono::duration<double>(timeout_s);
  return options;
}

/// Small integers that depend on the seed: sums and products stay exact.
inline at::Tensor numbers(at::IntArrayRef sizes, std::int64_t seed, at::ScalarType dtype = at::kFloat) {
  std::int64_t numel = 1;
  for (const auto size : sizes) numel *= size;
  return ((at::arange(numel, at::kLong) * (seed * 2 + 3) + seed) % 11 - 5).reshape(sizes).to(dtype);
}

/// fn(rank, store): one store a rank; it is gone before its communicator.
inline void with_stores(const World& world, const StoreOptions& options,
                        const std::function<void(int, std::shared_ptr<ParameterStore>)>& fn) {
  run_ranks(world.size, comm_options(world), [&](int rank, Communicator& comm) {
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

#define UNSHARD_EVERY_WORLD(suite)                                                                                              \
  INSTANTIATE_TEST_SUITE_P(Worlds, suite,                                                                                       \
                           ::testing::Values(World{1, true}, World{2, true}, World{3, true}, World{2, false}, World{3, false}), \
                           ::unshard::testing::world_name)

}  // namespace unshard::testing
