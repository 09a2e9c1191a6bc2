// Ranks and steps that don't do the same: experts by chance, several backwards, unequal numbers of them, parameters that come and go.
#include <thread>

#include "engine_testing.h"

namespace unshard::testing {
namespace {

/// The language model with experts, of which each micro-batch uses one.
struct ExpertModel : TinyModel {
  ExpertModel() {
    for (int e = 0; e < kExperts; ++e) add(cat("experts.", e, ".weight"), filled({kHidden, kHidden}, 20 + e));
  }
};

std::shared_ptr<TinyModel> with_experts() { return std::make_shared<ExpertModel>(); }

unsigned chance(int rank, int micro) {
  unsigned x = static_cast<unsigned>(rank) * 2654435761U + static_cast<unsigned>(micro) * 40503U + 12345U;
  x ^= x >> 13;
  x *= 2246822519U;
  return x ^ (x >> 16);
}

at::Tensor expert_loss(TinyModel& model, int rank, int micro) {
  const auto& weight = model.p.at(cat("experts.", chance(rank, micro) % kExperts, ".weight"));
  return at::linear(model.hidden(tokens_of(rank, micro)), weight).pow(2).mean();
}

class ControlFlow : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Stage, ControlFlow, ::testing::Values(0, 1, 2, 3));

TEST_P(ControlFlow, ExpertsChosenByRankAtRandomTrainAsDense) {
  RunOptions run;
  run.stage = GetParam();
  run.steps = 20;
  for (const int ranks : {2, 4}) {
    run.ranks = ranks;
    const auto dense_model = with_experts();
    DenseTrainer trainer(*dense_model, 0.01, 0.1);
    for (int step = 0; step < run.steps; ++step) {
      for (int rank = 0; rank < ranks; ++rank) add_gradient(expert_loss(*dense_model, rank, step), 1.0 / ranks);
      trainer.update();
    }
    Weights dense;
    for (const auto& name : dense_model->order) dense[name] = dense_model->p.at(name).detach();
    const auto check_steps = [&](Engine& engine, TinyModel& model, int) {
      for (const auto& name : model.order) {
        EXPECT_EQ(engine.optimizer()->step_count(engine.store().find(model.p.at(name))), trainer.steps(name)) << name;
      }
    };
    expect_close(train(run, with_experts, expert_loss, check_steps).weights, dense, 2e-5);
  }
}

TEST_P(ControlFlow, ExpertsTrainAlikeInAnyMemoryAndWithAnyRing) {
  RunOptions run;
  run.stage = GetParam();
  run.steps = 5;
  run.accumulation = 2;
  run.ranks = 3;
  const auto want = train(run, with_experts, expert_loss);
  run.tuning.bucket_numel = 30;
  run.tuning.ring_bytes = 1;
  expect_same_bits(train(run, with_experts, expert_loss).weights, want.weights);
  run.tuning.before_reduce = [](int bucket) { std::this_thread::sleep_for(std::chrono::microseconds(300 * (bucket % 4))); };
  expect_same_bits(train(run, with_experts, expert_loss).weights, want.weights);
  run.share_memory = false;
  expect_same_bits(train(run, with_experts, expert_loss).weights, want.weights);
}

// One rank, or two that do the same kind of thing; `body` runs one step's backwards.
using Body = std::function<void(Engine&, TinyModel&, int rank, int step)>;
Weights run_bodies(int stage, int accumulation, const Body& body, int steps = 3, bool share_memory = true, bool sgd = true) {
  Weights result;
  RunOptions run;
  run.stage = stage;
  run.accumulation = accumulation;
  run.sgd = sgd;
  CommOptions options;
  options.share_memory = share_memory;
  run_ranks(2, options, [&](int rank, Communicator& comm) {
    TinyModel model;
    Engine engine(model.named(), config_of(run, 2), share(comm), small_buckets());
    for (int step = 0; step < steps; ++step) body(engine, model, rank, step);
    const auto weights = weights_of(engine, model);
    if (rank == 0) result = weights;
    engine.destroy();
  });
  return result;
}

Weights dense_bodies(const std::function<void(TinyModel&, int step)>& add_all, int steps = 3) {
  TinyModel model;
  DenseTrainer trainer(model, 0.01, 0.1, /*sgd=*/true);
  for (int step = 0; step < steps; ++step) {
    add_all(model, step);
    trainer.update();
  }
  Weights weights;
  for (const auto& name : model.order) weights[name] = model.p.at(name).detach();
  return weights;
}

at::Tensor second_loss(TinyModel& model, int rank, int step) { return model.hidden(tokens_of(rank, step + 50)).pow(2).mean(); }

TEST_P(ControlFlow, SeveralBackwardsBeforeAStepAddUp) {
  const auto dense = dense_bodies([](TinyModel& model, int step) {
    for (int rank = 0; rank < 2; ++rank) {
      add_gradient(language_loss(model, rank, step), 0.5);
      add_gradient(second_loss(model, rank, step), 0.5);
    }
  });
  const auto twice = run_bodies(GetParam(), 1, [](Engine& engine, TinyModel& model, int rank, int step) {
    engine.backward(language_loss(model, rank, step));
    engine.backward(second_loss(model, rank, step));
    engine.step();
  });
  const auto plain = run_bodies(GetParam(), 1, [](Engine& engine, TinyModel& model, int rank, int step) {
    torch::autograd::backward({language_loss(model, rank, step)});
    torch::autograd::backward({second_loss(model, rank, step)});
    engine.step();
  });
  const auto sum = run_bodies(GetParam(), 1, [](Engine& engine, TinyModel& model, int rank, int step) {
    engine.backward(language_loss(model, rank, step) + second_loss(model, rank, step));
    engine.step();
  });
  expect_close(twice, dense, 1e-6);
  expect_same_bits(plain, twice);
  expect_close(sum, dense, 1e-6);
}

TEST_P(ControlFlow, OneGraphMayBeWalkedTwice) {
  const auto dense = dense_bodies([](TinyModel& model, int step) {
    for (int rank = 0; rank < 2; ++rank) {
      const auto hidden = model.hidden(tokens_of(rank, step));
      torch::autograd::backward({hidden.pow(2).mean() * 0.5}, {}, true);
      torch::autograd::backward({hidden.abs().mean() * 0.5});
    }
  });
  const auto got = run_bodies(GetParam(), 1, [](Engine& engine, TinyModel& model, int rank, int step) {
    const auto hidden = model.hidden(tokens_of(rank, step));
    engine.backward(hidden.pow(2).mean(), /*retain_graph=*/true);
    engine.backward(hidden.abs().mean());
    engine.step();
  });
  expect_close(got, dense, 1e-6);
}

TEST_P(ControlFlow, EveryWayToCallBackwardScalesAlike) {
  const auto with = [&](const Body& micro) {
    return run_bodies(GetParam(), 4, [&](Engine& engine, TinyModel& model, int rank, int step) {
      for (int a = 0; a < 4; ++a) {
        micro(engine, model, rank, step * 4 + a);
        engine.step();
      }
    });
  };
  const auto engine_backward =
      with([](Engine& engine, TinyModel& model, int rank, int micro) { engine.backward(language_loss(model, rank, micro)); });
  const auto scaled = with([](Engine& engine, TinyModel& model, int rank, int micro) {
    torch::autograd::backward({engine.scale(language_loss(model, rank, micro))});
  });
  const auto plain =
      with([](Engine& engine, TinyModel& model, int rank, int micro) { torch::autograd::backward({language_loss(model, rank, micro)}); });
  const auto mixed = with([](Engine& engine, TinyModel& model, int rank, int micro) {
    if (micro % 2) {
      torch::autograd::backward({language_loss(model, rank, micro)});
    } else {
      engine.backward(language_loss(model, rank, micro));
    }
  });
  expect_same_bits(scaled, engine_backward);  // a factor that is a power of two rounds nowhere
  expect_same_bits(plain, engine_backward);
  expect_same_bits(mixed, engine_backward);
}

TEST_P(ControlFlow, ARankWithFewerBackwardsAddsNothingForTheMissingOnes) {
  const auto runs = [](int rank, int micro) { return rank == 0 || micro % 3 == 0; };
  const auto dense = dense_bodies([&](TinyModel& model, int step) {
    for (int a = 0; a < 3; ++a) {
      for (int rank = 0; rank < 2; ++rank) {
        if (runs(rank, step * 3 + a)) add_gradient(language_loss(model, rank, step * 3 + a), 1.0 / 6);
      }
    }
  });
  for (const bool share_memory : {true, false}) {
    const auto got = run_bodies(
        GetParam(), 3,
        [&](Engine& engine, TinyModel& model, int rank, int step) {
          for (int a = 0; a < 3; ++a) {
            if (runs(rank, step * 3 + a)) engine.backward(language_loss(model, rank, step * 3 + a));
            engine.step();
          }
        },
        3, share_memory);
    expect_close(got, dense, 1e-6);
  }
}

TEST_P(ControlFlow, ForwardsWithoutBackwardAreFreeOnAnyRank) {
  const auto want = run_bodies(GetParam(), 1, [](Engine& engine, TinyModel& model, int rank, int step) {
    engine.backward(language_loss(model, rank, step));
    engine.step();
  });
  for (const bool share_memory : {true, false}) {
    const auto got = run_bodies(
        GetParam(), 1,
        [](Engine& engine, TinyModel& model, int rank, int step) {
          {
            const at::NoGradGuard no_grad;
            for (int extra = 0; extra < rank * 5 + step; ++extra) model.loss(tokens_of(rank, extra));
          }
          engine.backward(language_loss(model, rank, step));
          engine.step();
        },
        3, share_memory);
    expect_same_bits(got, want);
  }
}

TEST_P(ControlFlow, ZeroGradDropsWhatHasAddedUp) {
  const auto want = run_bodies(GetParam(), 1, [](Engine& engine, TinyModel& model, int rank, int step) {
    engine.backward(language_loss(model, rank, step));
    engine.step();
  });
  for (const bool share_memory : {true, false}) {
    const auto got = run_bodies(
        GetParam(), 1,
        [](Engine& engine, TinyModel& model, int rank, int step) {
          engine.zero_grad();
          engine.backward(language_loss(model, rank, step + 30));
          if (rank == 0) engine.backward(second_loss(model, rank, step));
          engine.zero_grad();
          engine.backward(language_loss(model, rank, step));
          engine.step();
          engine.zero_grad();
        },
        3, share_memory);
    expect_same_bits(got, want);
  }
}

TEST_P(ControlFlow, FrozenParametersStayAndLaterThawedOnesTrain) {
  const auto freeze = [](TinyModel& model) { model.p.at("up.weight").set_requires_grad(false); };
  TinyModel dense_model;
  freeze(dense_model);
  const auto start = dense_model.p.at("up.weight").clone();
  DenseTrainer trainer(dense_model, 0.01, 0.1);
  const auto dense_step = [&](int step) {
    for (int rank = 0; rank < 2; ++rank) add_gradient(language_loss(dense_model, rank, step), 0.5);
    trainer.update();
  };
  for (int step = 0; step < 2; ++step) dense_step(step);
  EXPECT_TRUE(at::equal(dense_model.p.at("up.weight"), start));
  dense_model.p.at("up.weight").set_requires_grad(true);
  for (int step = 2; step < 5; ++step) dense_step(step);

  RunOptions run;
  run.stage = GetParam();
  run_ranks(2, [&](int, Communicator& comm) {
    const int rank = comm.rank();
    TinyModel model;
    freeze(model);
    Engine engine(model.named(), config_of(run, 2), share(comm), small_buckets());
    const int id = engine.store().find(model.p.at("up.weight"));
    for (int step = 0; step < 5; ++step) {
      if (step == 2) {
        EXPECT_TRUE(at::equal(engine.full_fp32_param(id), start));
        EXPECT_EQ(engine.optimizer()->step_count(id), 0);
        model.p.at("up.weight").set_requires_grad(true);
      }
      engine.backward(language_loss(model, rank, step));
      engine.step();
    }
    EXPECT_EQ(engine.optimizer()->step_count(id), 3);
    for (const auto& [name, value] : weights_of(engine, model)) {
      EXPECT_LE((value - dense_model.p.at(name)).abs().max().item<double>(), 1e-5) << name;
    }
    engine.destroy();
  });
}

TEST_P(ControlFlow, SparseEmbeddingGradientsEqualDenseOnes) {
  const auto loss_with = [](bool sparse) {
    return [sparse](Engine& engine, TinyModel& model, int rank, int step) {
      const auto x = at::embedding(model.p.at("embed.weight"), tokens_of(rank, step), -1, false, sparse);
      engine.backward((x * at::arange(kHidden)).pow(2).mean());
      engine.step();
    };
  };
  expect_same_bits(run_bodies(GetParam(), 1, loss_with(true)), run_bodies(GetParam(), 1, loss_with(false)));
}

TEST_P(ControlFlow, ParametersInAnyStridesTrainAlike) {
  Weights by_strides[2];
  for (const int transposed : {0, 1}) {
    run_ranks(2, [&](int rank, Communicator& comm) {
      RunOptions run;
      run.stage = GetParam();
      auto value = filled({5, 9}, 1);
      if (transposed) value = value.t().contiguous().t();
      const NamedParameters parameters{{"w", value.clone().set_requires_grad(true)}};
      ASSERT_EQ(parameters[0].second.is_contiguous(), !transposed);
      Engine engine(parameters, config_of(run, 2), share(comm), small_buckets());
      for (int step = 0; step < 3; ++step) {
        engine.backward((parameters[0].second.matmul(filled({9, 4}, rank + step))).pow(2).mean());
        engine.step();
      }
      const auto whole = engine.full_fp32_param(0);
      if (rank == 0) by_strides[transposed]["w"] = whole.contiguous();
      engine.destroy();
    });
  }
  // Gradients come from products whose order of additions depends on the strides.
  expect_close(by_strides[1], by_strides[0], 1e-6);
}

TEST(ControlFlowThreads, SeveralThreadsMayRunBackwardAtOnce) {
  RunOptions run;
  run.ranks = 1;
  run.sgd = true;
  const auto dense = dense_bodies(
      [](TinyModel& model, int) {
        for (int i = 0; i < 40; ++i) add_gradient(language_loss(model, 0, i), 1.0);
      },
      1);
  run_ranks(1, [&](int, Communicator& comm) {
    run.stage = 3;
    TinyModel model;
    Engine engine(model.named(), config_of(run, 1), share(comm), small_buckets());
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < 10; ++i) engine.backward(language_loss(model, 0, t * 10 + i));
      });
    }
    for (auto& thread : threads) thread.join();
    engine.step();
    for (const auto& [name, value] : weights_of(engine, model)) {
      EXPECT_LE((value - dense.at(name)).abs().max().item<double>(), 1e-4) << name;
    }
    for (const auto& name : model.order) EXPECT_FALSE(model.p.at(name).grad().defined());
  });
}

}  // namespace
}  // namespace unshard::testing
