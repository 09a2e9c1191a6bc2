// Training, evaluation and generation take turns: each has a trace and a plan of its own, which the others don't disturb.
#include "zero/mode.h"

#include <torch/csrc/autograd/autograd.h>

#include <thread>

#include "zero/state.h"
#include "zero/store_testing.h"

namespace unshard::zero {
namespace {

using testing::numbers;
using testing::on_hosts;
using testing::World;

TEST(Mode, IsToldByForwardAndGradients) {
  EXPECT_EQ(mode_of_touch(Forward::with_gradients, false), Mode::train);
  EXPECT_EQ(mode_of_touch(Forward::none, false), Mode::train);
  const at::NoGradGuard no_grad;
  EXPECT_EQ(mode_of_touch(Forward::without_gradients, false), Mode::eval);
  EXPECT_EQ(mode_of_touch(Forward::without_gradients, true), Mode::eval) << "an evaluation between micro-batches";
  EXPECT_EQ(mode_of_touch(Forward::none, false), Mode::generate);
  EXPECT_EQ(mode_of_touch(Forward::none, true), Mode::train);
  EXPECT_EQ(mode_of_touch(Forward::with_gradients, false), Mode::train) << "a checkpointed layer";
}

TEST(Mode, ABackwardTouchesForGradientsAlthoughTheyAreOff) {
  auto x = at::ones({2});
  x.requires_grad_(true);
  bool asked = false, grad_mode = true, for_gradients = false;
  x.register_hook([&](const at::Tensor& grad) {
    asked = true;
    grad_mode = at::GradMode::is_enabled();
    for_gradients = touches_for_gradients();
    return grad;
  });
  torch::autograd::backward({(x * x).sum()}, {});
  ASSERT_TRUE(asked);
  EXPECT_FALSE(grad_mode);
  EXPECT_TRUE(for_gradients);
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(touches_for_gradients());
}

/// A model whose modes touch different parameters in different orders.
struct Program {
  static constexpr int kCount = 8;
  std::shared_ptr<ParameterStore> store;
  std::vector<at::Tensor> parameters, twins;
  std::int64_t steps = 0;

  explicit Program(std::shared_ptr<ParameterStore> of) : store(std::move(of)) {
    for (int i = 0; i < kCount; ++i) {
      parameters.push_back(numbers({7 + i % 3, 6}, i));
      twins.push_back(numbers({7 + i % 3, 6}, i));
      store->add(parameters.back(), "p" + std::to_string(i), true);
    }
    store->settle();
    store->begin_step(0);
  }
  StoreState& state() { return state_of(*store); }
  void touch(const std::vector<int>& ids) {
    for (const int id : ids) {
      const auto k = static_cast<std::size_t>(id);
      ASSERT_TRUE(at::equal(parameters[k] * 1, twins[k])) << "parameter " << id;
    }
  }
  void step() {
    store->begin_forward();
    touch({0, 1, 2, 3, 4, 5, 6, 7, 0});
    store->end_forward();
    touch({7, 6, 5, 4, 3, 2, 1, 0});
    store->settle();
    for (int id = 0; id < kCount; ++id) {
      store->own_slice(id).add_(1);
      twins[static_cast<std::size_t>(id)].add_(1);
    }
    store->publish(std::vector<std::uint8_t>(kCount, 1));
    store->begin_step(++steps);
  }
  void evaluate(int batches) {
    const at::NoGradGuard no_grad;
    for (int i = 0; i < batches; ++i) {
      store->begin_forward();
      touch({0, 2, 4, 6, 1, 3});
      store->end_forward();
    }
  }
  /// A decoder whose first weight is the last one too.
  void generate(int tokens, const std::vector<int>& decoder = {0, 1, 3, 5, 7, 6, 0}) {
    const at::NoGradGuard no_grad;
    for (int i = 0; i < tokens; ++i) touch(decoder);
  }
  void peek(int id) {
    const at::NoGradGuard no_grad;
    touch({id});
  }
  /// Fetches of a turn that no plan had made ahead of their touch.
  std::int64_t demanded(const std::function<void()>& turn) {
    const auto before = store->stats();
    turn();
    const auto after = store->stats();
    return (after.gathers - after.prefetched) - (before.gathers - before.prefetched);
  }
};

class ModesAcrossHosts : public testing::EveryWorld {
 protected:
  /// Touches outside the plan in `turn`, which all ranks follow together.
  static std::int64_t outside(Program& program, Mode mode, const std::function<void()>& turn) {
    EXPECT_TRUE(program.state().of(mode).follower->agreed()) << "no plan is agreed for mode " << static_cast<int>(mode);
    const auto before = program.store->stats().outside_plan;
    turn();
    return program.store->stats().outside_plan - before;
  }
};
INSTANTIATE_TEST_SUITE_P(Worlds, ModesAcrossHosts, ::testing::Values(on_hosts({1, 1}), on_hosts({2, 2}), on_hosts({1, 2})),
                         testing::world_name);

TEST_P(ModesAcrossHosts, EachHasItsPlanAtOnceWhenItsTurnComesAgain) {
  for (const std::int64_t budget : {1'000'000, 90}) {
    StoreOptions options;
    options.max_live_numel = budget;
    options.prefetch_numel = 60;
    run(options, [](int, auto store) {
      Program program(store);
      for (int i = 0; i < 3; ++i) program.step();
      program.evaluate(2);
      program.generate(3);
      EXPECT_EQ(outside(program, Mode::train, [&] { program.step(); }), 0) << "the first step after an evaluation";
      EXPECT_EQ(outside(program, Mode::eval, [&] { program.evaluate(3); }), 0) << "the second evaluation";
      EXPECT_EQ(outside(program, Mode::generate, [&] { program.generate(5); }), 0) << "generating again";
      EXPECT_EQ(outside(program, Mode::train, [&] { program.step(); }), 0);
    });
  }
}

TEST_P(ModesAcrossHosts, AnEvaluationInsideAStepLeavesItsTrace) {
  run([](int, auto store) {
    Program program(store);
    program.touch({0, 1, 2});
    program.evaluate(2);
    program.touch({2, 1, 0});
    EXPECT_EQ(program.state().of(Mode::train).trace.recorded(), (std::vector<int>{0, 1, 2, 1, 0}));
  });
}

TEST_P(ModesAcrossHosts, RanksMayEvaluateAndGenerateUnequallyLong) {
  run([](int rank, auto store) {
    Program program(store);
    for (int round = 0; round < 4; ++round) {
      const auto turn = [&] {
        program.step();
        program.evaluate(1 + (rank + round) % 3);
        program.generate(2 + (rank * 5 + round) % 4);
      };
      if (round < 2) {
        turn();
        continue;
      }
      for (const auto mode : {Mode::train, Mode::eval, Mode::generate}) EXPECT_EQ(outside(program, mode, turn), 0) << round;
    }
    if (rank == 0) program.evaluate(2);  // and one of them alone
    EXPECT_EQ(outside(program, Mode::train, [&] { program.step(); }), 0);
  });
}

TEST_P(ModesAcrossHosts, ALookAtAWeightDoesNotLoseThePlans) {
  run([](int, auto store) {
    Program program(store);
    for (int round = 0; round < 2; ++round) {
      program.step();
      program.evaluate(2);
      program.generate(2);
    }
    program.step();
    program.peek(5);
    EXPECT_EQ(outside(program, Mode::eval, [&] { program.evaluate(2); }), 0);
    EXPECT_EQ(outside(program, Mode::generate, [&] { program.generate(2); }), 0);
    EXPECT_EQ(outside(program, Mode::train, [&] { program.step(); }), 0);
  });
}

TEST_P(ModesAcrossHosts, TheHeadOfAnEvaluationIsFetchedBeforeItsFirstTouch) {
  run([](int, auto store) {
    Program program(store);
    program.step();
    program.evaluate(1);
    program.step();
    store->comm().barrier("ranks stand at the same place");
    const at::NoGradGuard no_grad;
    const auto demanded = program.state().demanded_bytes.load();
    store->begin_forward();
    const auto& copy = *program.state().host_copy;
    const auto& entries = program.state().entries;
    for (const int id : {0, 2, 4, 6, 1, 3}) {
      while (copy.presence(id, entries[static_cast<std::size_t>(id)]->epoch.load()) != Presence::present) std::this_thread::yield();
    }
    program.touch({0, 2, 4, 6, 1, 3});
    store->end_forward();
    EXPECT_EQ(program.state().demanded_bytes.load(), demanded);
  });
}

class ModesInPrivateMemory : public testing::EveryWorld {};
INSTANTIATE_TEST_SUITE_P(Worlds, ModesInPrivateMemory, ::testing::Values(World{2, false}, World{3, false}), testing::world_name);

// With a window of one parameter each touch asks for the next one: a turn that follows its trace demands its first parameter only.
TEST_P(ModesInPrivateMemory, EachHasItsTraceAtOnceWhenItsTurnComesAgain) {
  StoreOptions options;
  options.prefetch_numel = 1;
  run(options, [](int, auto store) {
    Program program(store);
    const auto anew = [&](const std::function<void()>& turn) {
      store->release_gathered();
      return program.demanded(turn);
    };
    const auto step = [&] { program.step(); };
    const auto evaluate = [&] { program.evaluate(1); };
    const auto generate = [&] { program.generate(1, {1, 3, 5, 7, 6, 0}); };
    EXPECT_EQ(anew(step), 8);
    EXPECT_EQ(anew(step), 1);
    EXPECT_EQ(anew(evaluate), 6) << "nothing is known yet";
    EXPECT_EQ(anew(evaluate), 1) << "the second batch";
    EXPECT_EQ(anew(generate), 6);
    EXPECT_EQ(anew(generate), 1) << "the second token";
    EXPECT_EQ(anew(step), 1) << "the first step after it";
    EXPECT_EQ(anew(evaluate), 1) << "the second evaluation";
    EXPECT_EQ(anew(generate), 1);
    EXPECT_EQ(anew(step), 1);
  });
}

TEST_P(ModesInPrivateMemory, AnEvaluationInsideAStepLeavesItsTrace) {
  run([](int, auto store) {
    Program program(store);
    program.touch({0, 1, 2});
    program.evaluate(2);
    program.touch({2, 1, 0});  // backward begins with what forward ended with: one touch
    EXPECT_EQ(program.state().of(Mode::train).trace.recorded(), (std::vector<int>{0, 1, 2, 1, 0}));
  });
}

TEST_P(ModesInPrivateMemory, WhatAForwardCallsWithoutGradientsIsPartOfTheStep) {
  StoreOptions options;
  options.prefetch_numel = 1;
  run(options, [](int, auto store) {
    Program program(store);
    for (int i = 0; i < 3; ++i) {
      store->release_gathered();
      store->begin_forward();
      program.peek(0);  // a checkpointed layer comes first
      program.touch({1, 2});
      program.peek(3);
      store->end_forward();
      program.peek(4);  // and one outside the engine's forward
      program.touch({5});
      EXPECT_EQ(program.state().of(Mode::train).trace.recorded(), (std::vector<int>{0, 1, 2, 3, 4, 5}));
      store->begin_step(i);
    }
    EXPECT_TRUE(program.state().of(Mode::eval).trace.followed().empty());
    EXPECT_TRUE(program.state().of(Mode::generate).trace.followed().empty());
  });
}

}  // namespace
}  // namespace unshard::zero
