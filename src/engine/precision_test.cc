// bf16 and fp16 with fp32 masters, clipping, overflow.
#include "engine_testing.h"

namespace unshard::testing {
namespace {

const char* const kBf16 = R"(, "bf16": {"enabled": true})";

RunOptions bf16_run(int stage) {
  RunOptions run;
  run.stage = stage;
  run.extra = kBf16;
  return run;
}

TEST(Precision, Bf16StagesAgreeBitForBitAndParametersAreCastMasters) {
  std::vector<RunResult> stages;
  for (int stage = 0; stage <= 3; ++stage) {
    for (const bool share_memory : {true, false}) {
      SCOPED_TRACE(cat("stage ", stage, ", shared ", share_memory));
      auto run = bf16_run(stage);
      run.accumulation = 3;
      run.share_memory = share_memory;
      stages.push_back(train(run, tiny, language_loss, [](Engine& engine, TinyModel& model, int) {
        for (const auto& name : model.order) {
          const auto& parameter = model.p.at(name);
          ASSERT_EQ(parameter.scalar_type(), at::kBFloat16);
          const auto master = engine.full_fp32_param(engine.store().find(parameter));
          EXPECT_EQ(master.scalar_type(), at::kFloat);
          EXPECT_TRUE(at::equal(master.to(at::kBFloat16), parameter.detach().clone())) << name;
        }
      }));
      expect_same_bits(stages.back().weights, stages.front().weights);
      EXPECT_EQ(stages.back().losses, stages.front().losses);
      EXPECT_EQ(stages.back().norms, stages.front().norms);
    }
  }
}

TEST(Precision, Bf16UpdatesFp32MastersThatStartAsTheWeights) {
  // By hand: 16-bit forward and gradients, fp32 mean, fp32 masters that start as the 16-bit weights.
  TinyModel originals;
  std::map<std::string, at::Tensor> masters;
  for (const auto& name : originals.order) masters[name] = originals.p.at(name).detach().to(at::kBFloat16).to(at::kFloat);
  TinyModel half;
  for (int step = 0; step < 3; ++step) {
    std::map<std::string, at::Tensor> sums;
    for (const auto& name : half.order) half.p[name] = masters.at(name).to(at::kBFloat16).set_requires_grad(true);
    for (int rank = 0; rank < 2; ++rank) {
      torch::autograd::backward({language_loss(half, rank, step)});
      for (const auto& name : half.order) {
        const auto grad = half.p.at(name).grad().to(at::kFloat);
        sums[name] = sums[name].defined() ? sums[name] + grad : grad;
        half.p.at(name).mutable_grad().reset();
      }
    }
    for (const auto& name : half.order) masters[name] = masters[name] - 0.01 * (sums[name] * 0.5 + 0.1 * masters[name]);
  }
  for (int stage = 0; stage <= 3; ++stage) {
    auto run = bf16_run(stage);
    run.sgd = true;
    expect_close(train(run, tiny, language_loss).weights, masters, 1e-6);
  }
}

TEST(Precision, GradientsAddUpInFp32OverManyMicroBatches) {
  for (const int stage : {0, 2, 3}) {
    run_ranks(2, [&](int, Communicator& comm) {
      auto run = bf16_run(stage);
      run.accumulation = 256;
      run.sgd = true;
      const NamedParameters parameters{{"w", at::zeros({10}).set_requires_grad(true)}};
      Engine engine(parameters, config_of(run, 2), share(comm), small_buckets());
      // 1 once and 2^-9 255 times: in bf16 the sum would stay at 1.
      for (int micro = 0; micro < 256; ++micro) {
        const double gradient = micro == 0 ? 1.0 : 1.0 / 512;
        engine.backward((parameters[0].second * gradient * 256.0).sum());
        if (micro < 255) engine.step();
      }
      EXPECT_NEAR(engine.full_grad(0)[0].item<double>(), 1 + 255.0 / 512, 1e-6);
      engine.step();
      engine.destroy();
    });
  }
}

TEST(Precision, Fp16OverflowOnOneRankSkipsOnAllAndIsNamed) {
  for (int stage = 0; stage <= 3; ++stage) {
    SCOPED_TRACE(stage);
    ::testing::internal::CaptureStderr();
    run_ranks(2, [&](int rank, Communicator& comm) {
      RunOptions run;
      run.stage = stage;
      run.extra = R"(, "fp16": {"enabled": true, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 100})";
      TinyModel model;
      Engine engine(model.named(), config_of(run, 2), share(comm), small_buckets());
      for (int step = 0; step < 4; ++step) {
        const auto before = weights_of(engine, model);
        const double factor = step == 2 && rank == 1 ? 1e6 : 1;
        engine.backward(language_loss(model, rank, step) * factor);
        engine.step();
        EXPECT_EQ(engine.was_step_applied(), step != 2);
        EXPECT_EQ(engine.overflow(), step == 2);
        if (step == 2) {
          expect_same_bits(weights_of(engine, model), before);
          EXPECT_TRUE(std::isinf(*engine.last_grad_norm()));
        }
        EXPECT_EQ(engine.loss_scale(), step < 2 ? 256 : 128);
      }
      EXPECT_EQ(engine.skipped_steps(), 1);
      EXPECT_EQ(engine.global_steps(), 4);
      EXPECT_EQ(engine.applied_updates(), 3);
      EXPECT_EQ(engine.optimizer()->step_count(0), 3);
      engine.destroy();
    });
    const auto text = ::testing::internal::GetCapturedStderr();
    EXPECT_NE(text.find("step 2 skipped on all ranks: the gradient of rank 1 is not finite, first in parameter '"), std::string::npos)
        << text;
  }
}

TEST(Precision, ANanInFp32IsSkippedAndTheScheduleWaits) {
  run_ranks(2, [&](int rank, Communicator& comm) {
    RunOptions run;
    run.stage = 2;
    run.extra = R"(, "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.1, "warmup_num_steps": 10,)"
                R"( "warmup_type": "linear"}})";
    TinyModel model;
    Engine engine(model.named(), config_of(run, 2), share(comm), small_buckets());
    std::vector<double> rates;
    for (int step = 0; step < 4; ++step) {
      rates.push_back(engine.groups()[0].lr);
      engine.backward(language_loss(model, rank, step) * (step == 1 && rank == 1 ? std::nan("") : 1.0));
      engine.step();
    }
    EXPECT_EQ(rates[1], rates[2]);
    EXPECT_LT(rates[2], rates[3]);
    EXPECT_EQ(engine.skipped_steps(), 1);
    engine.destroy();
  });
}

TEST(Precision, ClippingFollowsTheGlobalNorm) {
  for (const double clipping : {0.05, 1e9}) {
    for (int stage = 0; stage <= 3; ++stage) {
      RunOptions run;
      run.stage = stage;
      run.clipping = clipping;
      run.sgd = true;
      const auto dense = train_dense(run, tiny, language_loss);
      const auto got = train(run, tiny, language_loss);
      expect_close(got.weights, dense.weights, 1e-6);
      for (std::size_t i = 0; i < dense.norms[0].size(); ++i) EXPECT_NEAR(got.norms[0][i], dense.norms[0][i], 1e-6);
    }
  }
}

TEST(Precision, SixteenBitCommunicationRoundsOnceAndAddsInFp32) {
  run_ranks(2, [&](int rank, Communicator& comm) {
    RunOptions run;
    run.extra = R"(, "communication_data_type": "bf16")";
    run.stage = 2;
    const NamedParameters parameters{{"w", at::zeros({5}).set_requires_grad(true)}};
    Engine engine(parameters, config_of(run, 2), share(comm), small_buckets());
    engine.backward((parameters[0].second * (rank == 0 ? 1.0 : 1.0 / 512)).sum());
    EXPECT_EQ(engine.full_grad(0)[0].item<double>(), (1 + 1.0 / 512) / 2);
    engine.step();
    engine.destroy();
  });
}

}  // namespace
}  // namespace unshard::testing
