// Gathered copies in memory that isn't shared: how much is held, what is fetched ahead, and random programs against a dense twin.
#include <random>

#include "core/soak.h"
#include "unshard/core/error.h"
#include "zero/store_testing.h"

namespace unshard {
namespace {

using testing::error_of;
using testing::numbers;
using testing::World;

struct Model {
  std::vector<at::Tensor> parameters, twins;
  std::int64_t largest = 0;

  Model(ParameterStore& store, std::mt19937& random, int count) {
    for (int i = 0; i < count; ++i) {
      const std::int64_t rows = 1 + static_cast<std::int64_t>(random() % 9);
      parameters.push_back(numbers({rows, 6}, i));
      twins.push_back(numbers({rows, 6}, i));
      store.add(parameters.back(), "p" + std::to_string(i), true);
      largest = std::max(largest, rows * 6);
    }
  }
};

class PrivateMemory : public testing::EveryWorld {};
INSTANTIATE_TEST_SUITE_P(Worlds, PrivateMemory, ::testing::Values(World{2, false}, World{3, false}), testing::world_name);

TEST_P(PrivateMemory, ReadingNeverExceedsTheBudget) {
  StoreOptions options;
  options.max_live_numel = 120;
  options.prefetch_numel = 60;
  run(options, [&](int rank, auto store) {
    std::mt19937 shapes(3), random(static_cast<unsigned>(rank + 1));
    const Model model(*store, shapes, 12);
    store->settle();
    for (int step = 0; step < 6; ++step) {
      store->begin_step(step);
      for (int i = 0; i < 40; ++i) {
        const auto k = static_cast<std::size_t>(random() % 12);
        ASSERT_TRUE(at::equal(model.parameters[k], model.twins[k])) << k;
        ASSERT_LE(store->stats().live_bytes, 120 * 4);
      }
    }
    EXPECT_LE(store->stats().peak_live_bytes, 120 * 4);
    EXPECT_GT(store->stats().gathers, 0);
    store->release_gathered();
    EXPECT_EQ(store->stats().live_bytes, 0);
  });
}

TEST_P(PrivateMemory, ABudgetOfNothingHoldsOneParameterAtATime) {
  StoreOptions options;
  options.max_live_numel = 0;
  options.prefetch_numel = 0;
  run(options, [&](int, auto store) {
    std::mt19937 shapes(3);
    const Model model(*store, shapes, 8);
    store->settle();
    for (std::size_t i = 0; i < 8; ++i) {
      EXPECT_TRUE(at::equal(model.parameters[i] * 1, model.twins[i]));
      EXPECT_EQ(store->stats().live_bytes, 0);
    }
    EXPECT_LE(store->stats().peak_live_bytes, model.largest * 4);
    EXPECT_EQ(store->stats().gathers, 8);
  });
}

TEST_P(PrivateMemory, ARepeatedStepFetchesAhead) {
  StoreOptions options;
  options.max_live_numel = 160;
  options.prefetch_numel = 100;
  run(options, [&](int, auto store) {
    std::mt19937 shapes(3);
    const Model model(*store, shapes, 12);
    store->settle();
    for (int step = 0; step < 4; ++step) {
      store->begin_step(step);
      for (std::size_t i = 0; i < 12; ++i) ASSERT_TRUE(at::equal(model.parameters[i] * 1, model.twins[i])) << i;
      for (std::size_t i = 12; i-- > 0;) ASSERT_TRUE(at::equal(model.parameters[i] * 1, model.twins[i])) << i;
      EXPECT_TRUE(step > 0 || store->stats().prefetched == 0);
    }
    EXPECT_GT(store->stats().prefetched, 0);
    EXPECT_LE(store->stats().peak_live_bytes, 160 * 4);
  });
}

TEST_P(PrivateMemory, APublishedValueIsNeverServedFromAnOldCopy) {
  StoreOptions options;
  options.prefetch_numel = 1000;
  run(options, [&](int, auto store) {
    std::mt19937 shapes(3);
    const Model model(*store, shapes, 6);
    store->settle();
    for (int step = 0; step < 8; ++step) {
      store->begin_step(step);
      for (std::size_t i = 0; i < 6; ++i) ASSERT_TRUE(at::equal(model.parameters[i] * 1, model.twins[i])) << step << ' ' << i;
      store->comm().barrier("all ranks ran forward");  // as the reduction of gradients does
      for (int i = 0; i < 6; ++i) {
        store->own_slice(i).add_(1);
        model.twins[static_cast<std::size_t>(i)].add_(1);
      }
      store->publish(std::vector<std::uint8_t>(6, 1));
    }
  });
}

TEST_P(PrivateMemory, PinsFetchTogetherAndHold) {
  StoreOptions options;
  options.max_live_numel = 0;
  run(options, [&](int, auto store) {
    std::mt19937 shapes(3);
    const Model model(*store, shapes, 5);
    store->settle();
    store->pin({0, 2, 4});
    EXPECT_EQ(store->stats().gathers, 3);
    EXPECT_EQ(store->stats().pinned, 3);
    for (const int i : {0, 2, 4}) EXPECT_NE(model.parameters[static_cast<std::size_t>(i)].const_data_ptr(), nullptr);
    (void)at::exp(model.parameters[0]);
    EXPECT_EQ(store->stats().gathers, 3);
    store->unpin({0, 2, 4});
    EXPECT_EQ(store->stats().live_bytes, 0);
  });
}

// Random programs: reads, writes by all ranks, pins, settles, updates, on every kind of world.
class Random : public testing::EveryWorld {};
UNSHARD_EVERY_WORLD(Random);

void random_program(ParameterStore& store, unsigned seed, int rank, int steps) {
  std::mt19937 shared(seed), own(seed * 31 + static_cast<unsigned>(rank));
  Model model(store, shared, 7);
  store.settle();
  for (int step = 0; step < steps; ++step) {
    const auto k = static_cast<std::size_t>(shared() % 7);
    auto& parameter = model.parameters[k];
    auto& twin = model.twins[k];
    switch (shared() % 8) {
      case 0:
        parameter.add_(1), twin.add_(1);
        break;
      case 1:
        parameter.select(0, 0).mul_(2), twin.select(0, 0).mul_(2);
        break;
      case 2:
        parameter.fill_(step), twin.fill_(step);
        break;
      case 3:
        store.settle();
        break;
      case 4: {
        const auto value = numbers(twin.sizes(), step);
        parameter.set_data(value.clone());
        twin.copy_(value);
        store.check_storages();
        break;
      }
      case 5: {
        store.settle();
        const int id = static_cast<int>(k);
        store.own_slice(id).add_(3);
        twin.add_(3);
        store.publish_one(id);
        break;
      }
      case 6: {
        const int modifier = static_cast<int>(shared() % static_cast<unsigned>(store.comm().world_size()));
        store.begin_edit({static_cast<int>(k)});
        parameter.fill_(rank + step);
        store.end_edit({static_cast<int>(k)}, modifier);
        twin.fill_(modifier + step);
        break;
      }
      default:
        store.begin_step(step);
        break;
    }
    for (unsigned reads = own() % 4; reads > 0; --reads) {  // unequal between ranks
      const auto r = static_cast<std::size_t>(own() % 7);
      ASSERT_TRUE(at::equal(model.parameters[r], model.twins[r])) << "seed " << seed << " step " << step << " parameter " << r;
    }
  }
  store.settle();
  for (std::size_t i = 0; i < 7; ++i)
    ASSERT_TRUE(at::equal(model.parameters[i], model.twins[i])) << "seed " << seed << " at the end, parameter " << i;
  ASSERT_EQ(store.stats().pinned, 0);
  store.release_all();
  for (std::size_t i = 0; i < 7; ++i)
    ASSERT_TRUE(at::equal(model.parameters[i], model.twins[i])) << "seed " << seed << " released, parameter " << i;
}

TEST_P(Random, ProgramsEqualDense) {
  StoreOptions options;
  options.max_live_numel = 90;
  options.prefetch_numel = 40;
  for (unsigned seed = 1; seed <= 4 * static_cast<unsigned>(testing::soak()); ++seed) {
    run(options, [&](int rank, auto store) { random_program(*store, seed, rank, 60); });
  }
}

}  // namespace
}  // namespace unshard
