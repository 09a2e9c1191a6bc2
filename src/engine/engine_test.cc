// The training protocol: counters, boundaries, errors, access to whole tensors, life and death of engines.
#include "engine_testing.h"

namespace unshard::testing {
namespace {

class EngineAt : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Stage, EngineAt, ::testing::Values(0, 1, 2, 3));

void expect_error(const std::function<void()>& call, const std::string& text) {
  try {
    call();
    ADD_FAILURE() << "no error; wanted one with: " << text;
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

TEST(Protocol, CountersMoveAtBoundaries) {
  run_ranks(2, [](int rank, Communicator& comm) {
    RunOptions run;
    run.accumulation = 4;
    run.stage = 2;
    TinyModel model;
    Engine engine(model.named(), config_of(run, 2), share(comm), small_buckets());
    EXPECT_FALSE(engine.last_grad_norm());
    for (int micro = 0; micro < 8; ++micro) {
      EXPECT_EQ(engine.is_gradient_accumulation_boundary(), micro % 4 == 3);
      engine.backward(language_loss(model, rank, micro));
      engine.step();
      EXPECT_EQ(engine.micro_steps(), micro + 1);
      EXPECT_EQ(engine.global_steps(), (micro + 1) / 4);
      EXPECT_EQ(engine.global_samples(), (micro + 1) / 4 * 8);
      EXPECT_EQ(engine.was_step_applied(), micro % 4 == 3);
    }
    engine.set_gradient_accumulation_boundary(true);
    engine.backward(language_loss(model, rank, 9));
    engine.step();
    EXPECT_EQ(engine.global_steps(), 3);
    EXPECT_EQ(engine.skipped_steps(), 0);
    EXPECT_EQ(engine.applied_updates(), 3);
    engine.destroy();
  });
}

TEST(Protocol, EveryStepUpdatesWhenAccumulationIsNotManaged) {
  run_ranks(2, [](int rank, Communicator& comm) {
    RunOptions run;
    run.accumulation = 4;
    run.stage = 2;
    run.extra = R"(, "managed_gradient_accumulation": false)";
    TinyModel model;
    Engine engine(model.named(), config_of(run, 2), share(comm), small_buckets());
    for (int micro = 0; micro < 3; ++micro) {
      EXPECT_TRUE(engine.is_gradient_accumulation_boundary());
      engine.backward(language_loss(model, rank, micro));
      engine.step();
      EXPECT_EQ(engine.global_steps(), micro + 1);
      EXPECT_EQ(engine.global_samples(), (micro + 1) * 2);  // of one micro-batch on each of two ranks
      EXPECT_TRUE(engine.was_step_applied());
    }
    engine.set_gradient_accumulation_boundary(false);
    engine.backward(language_loss(model, rank, 9));
    engine.step();
    EXPECT_EQ(engine.global_steps(), 3);
    engine.destroy();
  });
}

TEST(Protocol, AScheduleThatIsNotBuiltInIsAnErrorNotSilence) {
  RunOptions run;
  run.extra = R"(, "scheduler": {"type": "StepLR", "params": {"step_size": 3}})";
  TinyModel model;
  expect_error([&] { Engine(model.named(), config_of(run, 1), single_process_communicator()); }, "\"StepLR\" is not built in");
}

TEST(Protocol, MistakesAreNamedBeforeAnyCommunication) {
  RunOptions run;
  TinyModel model;
  auto comm = single_process_communicator();
  Engine engine(model.named(), config_of(run, 1), comm, small_buckets());
  expect_error([&] { engine.backward(model.hidden(tokens_of(0, 0))); }, "the loss must be a scalar, got shape [6, 7]");
  expect_error([&] { engine.backward(at::ones({})); }, "doesn't require a gradient");
  engine.set_no_sync(true);
  expect_error([&] { engine.set_no_sync(true); }, "can't be nested");
  expect_error([&] { engine.step(); }, "no_sync");
  engine.set_no_sync(false);
  expect_error([&] { engine.full_fp32_param(99); }, "no parameter with id 99");
  engine.destroy();
  expect_error([&] { engine.step(); }, "destroyed");
  expect_error(
      [&] {
        Engine(model.named(), config_of(run, 1), comm, [] {
          EngineOptions o;
          o.groups = {{{"embed.weigth"}, {}}};
          return o;
        }());
      },
      "'embed.weigth', which is not a parameter");
}

TEST(Protocol, DifferentModelsAreNamedOnAllRanks) {
  for (const bool share_memory : {true, false}) {
    CommOptions options;
    options.share_memory = share_memory;
    run_ranks(2, options, [](int rank, Communicator& comm) {
      NamedParameters parameters{{"a", at::ones({3}).set_requires_grad(true)},
                                 {"b", at::ones({rank == 0 ? 4 : 5}).set_requires_grad(true)}};
      expect_error([&] { Engine engine(parameters, config_of({}, 2), share(comm)); },
                   "ranks differ: rank 0 has parameter 'b' of shape [4] and dtype fp32, group 0, rank 1 has parameter 'b' of shape [5]");
    });
  }
}

TEST(Protocol, DifferentSettingsAreNamedOnAllRanks) {
  const std::vector<std::tuple<const char*, const char*, const char*>> cases{
      {R"("communication_data_type": "fp32")", R"("communication_data_type": "bf16")", "has communication_data_type = fp32, rank 1 has"},
      {R"("gradient_clipping": 1.0)", R"("gradient_clipping": 0.5)", "has gradient_clipping = 1.0, rank 1 has gradient_clipping = 0.5"},
      {R"("fp16": {"enabled": true})", R"("fp16": {"enabled": true, "initial_scale_power": 8})", "has fp16.initial_scale_power = 16"},
      {R"("optimizer": {"type": "SGD", "params": {"lr": 0.1}})", R"("optimizer": {"type": "SGD", "params": {"lr": 0.1, "nesterov": true}})",
       "optimizer.params.nesterov"},
      {R"("scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}})",
       R"("scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}})", "scheduler.params.warmup_num_steps = 2, rank 1 has"},
      {R"("zero_optimization": {"allgather_bucket_size": 100})", R"("zero_optimization": {"allgather_bucket_size": 200})",
       "zero_optimization.allgather_bucket_size = 100, rank 1 has"}};
  run_ranks(2, [&](int rank, Communicator& comm) {
    for (const auto& [first, second, said] : cases) {
      const NamedParameters parameters{{"a", at::ones({3}).set_requires_grad(true)}};
      const auto config =
          Config::from_json(cat(R"({"train_micro_batch_size_per_gpu": 1, )", rank == 0 ? first : second, "}"), {.world_size = 2});
      expect_error([&] { Engine engine(parameters, config, share(comm)); }, said);
    }
  });
}

TEST(Start, ParametersThatShareMemoryAreRefusedWhereTheyWouldComeApart) {
  const auto start = [](const NamedParameters& parameters, int stage, bool bf16) {
    RunOptions run;
    run.stage = stage;
    if (bf16) run.extra = R"(, "bf16": {"enabled": true})";
    run_ranks(1, [&](int, Communicator& comm) { Engine(parameters, config_of(run, 1), share(comm)).destroy(); });
  };
  const auto whole = filled({4, 3}, 1);
  for (int stage = 0; stage <= 3; ++stage) {
    const auto memory = whole.clone();
    const auto part = [&](std::int64_t first, std::int64_t count) { return memory.narrow(0, first, count).detach(); };
    const auto trained = [&](std::int64_t first, std::int64_t count) { return part(first, count).set_requires_grad(true); };
    expect_error([&] { start({{"a", trained(0, 4)}, {"b", trained(1, 2)}}, stage, false); }, "'a' and 'b' share memory");
    start({{"a", trained(0, 2)}, {"b", trained(2, 2)}}, std::min(stage, 2), false);  // side by side
    if (stage < 3) start({{"a", part(0, 4)}, {"b", part(1, 2)}, {"c", filled({2}, 1).set_requires_grad(true)}}, stage, false);  // frozen
    if (stage < 3) start({{"a", trained(0, 4)}, {"b", trained(0, 4)}}, stage, false);  // the same elements, where they are
    expect_error([&] { start({{"a", trained(0, 4)}, {"b", trained(0, 4)}}, stage, true); }, "register one nn.Parameter under both");
  }
}

TEST(Protocol, RankZeroStartsEveryone) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_ranks(2, [&](int rank, Communicator& comm) {
      RunOptions run;
      run.stage = stage;
      const NamedParameters parameters{{"big", filled({40}, rank).set_requires_grad(true)},
                                       {"small", filled({3}, rank + 5).set_requires_grad(true)}};
      Engine engine(parameters, config_of(run, 2), share(comm), small_buckets());
      EXPECT_TRUE(at::equal(engine.full_fp32_param(0), filled({40}, 0)));
      EXPECT_TRUE(at::equal(parameters[1].second.detach(), filled({3}, 5)));
      engine.destroy();
    });
  }
}

TEST_P(EngineAt, NoSyncGradientsAddUp) {
  RunOptions run;
  run.stage = GetParam();
  run.sgd = true;
  TinyModel dense_model;
  DenseTrainer trainer(dense_model, 0.01, 0.1, true);
  for (int rank = 0; rank < 2; ++rank) {
    for (int i = 0; i < 3; ++i) add_gradient(language_loss(dense_model, rank, i), 0.5);
  }
  trainer.update();
  run_ranks(2, [&](int rank, Communicator& comm) {
    TinyModel model;
    Engine engine(model.named(), config_of(run, 2), share(comm), small_buckets());
    engine.set_no_sync(true);
    engine.backward(language_loss(model, rank, 0));
    engine.backward(language_loss(model, rank, 1));
    engine.set_no_sync(false);
    engine.backward(language_loss(model, rank, 2));
    engine.step();
    for (const auto& [name, value] : weights_of(engine, model)) {
      EXPECT_LE((value - dense_model.p.at(name)).abs().max().item<double>(), 1e-6) << name;
    }
    engine.destroy();
  });
}

TEST_P(EngineAt, NormBeforeTheStepIsTheMeansAndSurvivesMoreGradients) {
  RunOptions run;
  run.stage = GetParam();
  TinyModel dense_model;
  const auto norm_of = [&] {
    double squares = 0;
    for (const auto& name : dense_model.order) squares += dense_model.p.at(name).grad().to(at::kDouble).pow(2).sum().item<double>();
    return std::sqrt(squares);
  };
  for (int rank = 0; rank < 2; ++rank) add_gradient(language_loss(dense_model, rank, 0), 0.5);
  const double first = norm_of();
  for (int rank = 0; rank < 2; ++rank) add_gradient(language_loss(dense_model, rank, 1), 0.5);
  const double both = norm_of();
  for (const bool share_memory : {true, false}) {
    CommOptions options;
    options.share_memory = share_memory;
    run_ranks(2, options, [&](int rank, Communicator& comm) {
      TinyModel model;
      Engine engine(model.named(), config_of(run, 2), share(comm), small_buckets());
      engine.backward(language_loss(model, rank, 0));
      EXPECT_NEAR(engine.compute_grad_norm(), first, 1e-6);
      EXPECT_NEAR(engine.compute_grad_norm(), first, 1e-6);
      engine.backward(language_loss(model, rank, 1));
      EXPECT_NEAR(engine.compute_grad_norm(), both, 1e-6);
      engine.step();
      EXPECT_NEAR(*engine.last_grad_norm(), both, 1e-6);
      engine.destroy();
    });
  }
}

TEST_P(EngineAt, WholeGradientsAndStatesCanBeReadAndWritten) {
  RunOptions run;
  run.stage = GetParam();
  TinyModel dense_model;
  for (int rank = 0; rank < 2; ++rank) add_gradient(language_loss(dense_model, rank, 0), 0.5);
  run_ranks(2, [&](int rank, Communicator& comm) {
    TinyModel model;
    Engine engine(model.named(), config_of(run, 2), share(comm), small_buckets());
    engine.backward(language_loss(model, rank, 0));
    for (const auto& name : model.order) {
      const int id = engine.store().find(model.p.at(name));
      const auto grad = engine.full_grad(id);
      EXPECT_LE((grad - dense_model.p.at(name).grad()).abs().max().item<double>(), 1e-6) << name;
      const auto& layout = engine.store().info(id).layout;
      const auto local = engine.local_grad(id);
      EXPECT_TRUE(at::equal(local, grad.reshape({-1}).slice(0, layout.begin(rank), layout.end(rank))));
    }
    const int up = engine.store().find(model.p.at("up.weight"));
    const auto written = filled({kWide, kHidden}, 40);
    engine.set_full_grad(up, written);
    EXPECT_LE((engine.full_grad(up) - written).abs().max().item<double>(), 1e-7);
    engine.step();
    EXPECT_LE((engine.full_state(up, "exp_avg") - written * 0.1).abs().max().item<double>(), 1e-7);
    EXPECT_EQ(engine.full_state(up, "step").item<double>(), 1);
    EXPECT_FALSE(engine.full_state(up, "nonsense").defined());

    engine.set_full_state(up, "exp_avg", filled({kWide, kHidden}, 41));
    EXPECT_TRUE(at::equal(engine.full_state(up, "exp_avg"), filled({kWide, kHidden}, 41)));
    engine.set_full_fp32_param(up, filled({kWide, kHidden}, 42));
    EXPECT_TRUE(at::equal(engine.full_fp32_param(up), filled({kWide, kHidden}, 42)));
    EXPECT_TRUE(at::equal(model.p.at("up.weight").detach().clone(), filled({kWide, kHidden}, 42)));
    const auto local = engine.local_fp32_param(up);
    const auto& layout = engine.store().info(up).layout;
    EXPECT_TRUE(at::equal(local, filled({kWide, kHidden}, 42).reshape({-1}).slice(0, layout.begin(rank), layout.end(rank))));
    engine.destroy();
  });
}

TEST_P(EngineAt, AGradientWrittenByHandTrainsAParameterThatHadNone) {
  RunOptions run;
  run.stage = GetParam();
  run.sgd = true;
  run_ranks(2, [&](int, Communicator& comm) {
    TinyModel model;
    Engine engine(model.named(), config_of(run, 2), share(comm), small_buckets());
    const int id = engine.store().find(model.p.at("down.weight"));
    EXPECT_FALSE(engine.full_grad(id).defined());
    engine.set_full_grad(id, at::ones({kHidden, kWide}));
    engine.step();
    const auto start = filled({kHidden, kWide}, 5);
    const auto want = start - 0.01 * (1 + 0.1 * start);
    EXPECT_LE((engine.full_fp32_param(id) - want).abs().max().item<double>(), 1e-6);
    const int other = engine.store().find(model.p.at("up.weight"));
    EXPECT_TRUE(at::equal(engine.full_fp32_param(other), filled({kWide, kHidden}, 3)));
    EXPECT_EQ(engine.optimizer()->step_count(other), 0);
    engine.destroy();
  });
}

TEST_P(EngineAt, WritesOfTheUserAreTrainedOn) {
  RunOptions run;
  run.stage = GetParam();
  run.sgd = true;
  TinyModel dense_model;
  DenseTrainer trainer(dense_model, 0.01, 0.1, true);
  const auto edit = [](TinyModel& model, int step) {
    const at::NoGradGuard no_grad;
    if (step == 1) model.p.at("up.weight").mul_(0.5);
    if (step == 2) model.p.at("down.weight").set_data(filled({kHidden, kWide}, 70));
  };
  for (int step = 0; step < 4; ++step) {
    edit(dense_model, step);
    for (int rank = 0; rank < 2; ++rank) add_gradient(language_loss(dense_model, rank, step), 0.5);
    trainer.update();
  }
  run_ranks(2, [&](int rank, Communicator& comm) {
    TinyModel model;
    Engine engine(model.named(), config_of(run, 2), share(comm), small_buckets());
    for (int step = 0; step < 4; ++step) {
      edit(model, step);
      engine.begin_forward();
      const auto loss = language_loss(model, rank, step);
      engine.end_forward();
      engine.backward(loss);
      engine.step();
    }
    for (const auto& [name, value] : weights_of(engine, model)) {
      EXPECT_LE((value - dense_model.p.at(name)).abs().max().item<double>(), 1e-6) << name;
    }
    engine.destroy();
  });
}

TEST_P(EngineAt, AGraphKeptAcrossAnUpdateIsAnError) {
  RunOptions run;
  run.stage = GetParam();
  run_ranks(2, [&](int rank, Communicator& comm) {
    TinyModel model;
    Engine engine(model.named(), config_of(run, 2), share(comm), small_buckets());
    const auto loss = language_loss(model, rank, 0);
    engine.backward(loss, /*retain_graph=*/true);
    engine.step();
    expect_error([&] { engine.backward(loss); }, "modified by an inplace operation");
    engine.zero_grad();
    engine.destroy();
  });
}

TEST(Life, EnginesAlternateInOneProcess) {
  RunOptions run;
  run.steps = 3;
  std::map<int, Weights> alone;
  for (run.stage = 0; run.stage <= 3; ++run.stage) alone[run.stage] = train(run, tiny, language_loss).weights;
  run_ranks(2, [&](int rank, Communicator& comm) {
    std::vector<std::unique_ptr<TinyModel>> models;
    std::vector<std::unique_ptr<Engine>> engines;
    for (int stage = 0; stage <= 3; ++stage) {
      RunOptions mine;
      mine.stage = stage;
      models.push_back(std::make_unique<TinyModel>());
      engines.push_back(std::make_unique<Engine>(models.back()->named(), config_of(mine, 2), share(comm), small_buckets()));
    }
    for (int step = 0; step < 3; ++step) {
      for (int stage = 0; stage <= 3; ++stage) {
        engines[stage]->backward(language_loss(*models[stage], rank, step));
        engines[stage]->step();
      }
    }
    for (int stage = 0; stage <= 3; ++stage) {
      expect_same_bits(weights_of(*engines[stage], *models[stage]), alone.at(stage));
      engines[stage]->destroy();
    }
  });
}

TEST_P(EngineAt, DestroyGivesBackPlainTensorsAndMemory) {
  RunOptions run;
  run.stage = GetParam();
  for (const bool share_memory : {true, false}) {
    CommOptions options;
    options.share_memory = share_memory;
    run_ranks(2, options, [&](int rank, Communicator& comm) {
      TinyModel model;
      Engine engine(model.named(), config_of(run, 2), share(comm), small_buckets());
      engine.backward(language_loss(model, rank, 0));
      engine.step();
      const auto weights = weights_of(engine, model);
      engine.destroy();
      engine.destroy();
      EXPECT_EQ(engine.memory().optimizer, 0);
      for (const auto& name : model.order) {
        const auto& parameter = model.p.at(name);
        EXPECT_TRUE(at::equal(parameter, weights.at(name)));
        EXPECT_NE(parameter.data_ptr(), nullptr);
        EXPECT_FALSE(parameter.key_set().has(c10::DispatchKey::DeferredInit));
      }
      torch::autograd::backward({language_loss(model, rank, 1)});  // plain torch again: gradients stay on the parameters
      for (const auto& name : model.order) EXPECT_TRUE(model.p.at(name).grad().defined()) << name;
    });
  }
}

TEST(Life, AnEngineMayDieAnywhere) {
  for (const bool share_memory : {true, false}) {
    CommOptions options;
    options.share_memory = share_memory;
    options.timeout = std::chrono::seconds(20);
    EXPECT_THROW(run_ranks(2, options,
                           [&](int rank, Communicator& comm) {
                             RunOptions run;
                             run.stage = 3;
                             TinyModel model;
                             Engine engine(model.named(), config_of(run, 2), share(comm), small_buckets());
                             engine.backward(language_loss(model, rank, 0));
                             if (rank == 1) throw std::runtime_error("the user's own error");
                             engine.step();
                           }),
                 std::runtime_error);
  }
}

TEST_P(EngineAt, InferenceNeedsNoCollective) {
  RunOptions run;
  run.stage = GetParam();
  for (const bool share_memory : {true, false}) {
    CommOptions options;
    options.share_memory = share_memory;
    run_ranks(2, options, [&](int rank, Communicator& comm) {
      TinyModel model;
      Engine engine(model.named(), config_of(run, 2), share(comm), small_buckets());
      engine.enter_inference();
      const auto gathers = engine.store().stats().gathers;
      {
        const at::NoGradGuard no_grad;
        for (int i = 0; i < 3 + 6 * rank; ++i) model.loss(tokens_of(rank, i));
      }
      EXPECT_EQ(engine.store().stats().gathers, gathers);
      engine.leave_inference();
      engine.backward(language_loss(model, rank, 0));
      engine.step();
      EXPECT_TRUE(engine.was_step_applied());
      engine.destroy();
    });
  }
}

TEST(Protocol, AReplacedParameterObjectIsNamed) {
  run_ranks(2, [](int rank, Communicator& comm) {
    TinyModel model;
    auto options = small_buckets();
    options.source = [&model] { return model.named(); };
    Engine engine(model.named(), config_of({}, 2), share(comm), options);
    engine.backward(language_loss(model, rank, 0));
    engine.step();
    model.p["up.bias"] = filled({kWide}, 3).set_requires_grad(true);
    expect_error([&] { engine.step(); }, "parameter 'up.bias' was replaced by a new object");
  });
}

TEST(Protocol, GroupsHaveTheirOwnHyperparametersAndTheRestIsFrozen) {
  run_ranks(2, [](int rank, Communicator& comm) {
    RunOptions run;
    run.sgd = true;
    run.stage = 3;
    TinyModel model;
    auto options = small_buckets();
    GroupOptions fast, slow;
    fast.lr = 0.5;
    slow.lr = 0.25;
    options.groups = {{{"up.weight"}, fast}, {{"down.weight"}, slow}};
    Engine engine(model.named(), config_of(run, 2), share(comm), options);
    engine.backward(language_loss(model, rank, 0));
    TinyModel dense;
    for (int r = 0; r < 2; ++r) add_gradient(language_loss(dense, r, 0), 0.5);
    engine.step();
    const auto weights = weights_of(engine, model);
    const auto want = [&](const char* name, double lr) { return dense.p.at(name).detach() - lr * dense.p.at(name).grad(); };
    EXPECT_LE((weights.at("up.weight") - want("up.weight", 0.5)).abs().max().item<double>(), 1e-6);
    EXPECT_LE((weights.at("down.weight") - want("down.weight", 0.25)).abs().max().item<double>(), 1e-6);
    EXPECT_TRUE(at::equal(weights.at("embed.weight"), filled({kVocab, kHidden}, 1)));
    engine.destroy();
  });
}

}  // namespace
}  // namespace unshard::testing
