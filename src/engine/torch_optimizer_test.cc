// Optimizers of torch::optim, and a torch::nn module, under the engine.
#include "unshard/engine/torch_optimizer.h"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "engine_testing.h"

namespace unshard::testing {
namespace {

using Make = std::function<std::shared_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

std::vector<at::Tensor> tensors_of(const NamedParameters& named) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : named) tensors.push_back(tensor);
  return tensors;
}

const std::vector<std::pair<const char*, Make>>& optimizers() {
  static const std::vector<std::pair<const char*, Make>> all{
      {"AdamW", [](auto p) { return std::make_shared<torch::optim::AdamW>(p, torch::optim::AdamWOptions(0.01)); }},
      {"Adam", [](auto p) { return std::make_shared<torch::optim::Adam>(p, torch::optim::AdamOptions(0.01).amsgrad(true)); }},
      {"SGD", [](auto p) { return std::make_shared<torch::optim::SGD>(p, torch::optim::SGDOptions(0.05).momentum(0.9)); }},
      {"Adagrad", [](auto p) { return std::make_shared<torch::optim::Adagrad>(p, torch::optim::AdagradOptions(0.05)); }},
      {"RMSprop", [](auto p) { return std::make_shared<torch::optim::RMSprop>(p, torch::optim::RMSpropOptions(0.01)); }}};
  return all;
}

TEST(TorchOptimizer, EqualsItsDenseSelfAtEveryStage) {
  for (const auto& [name, make] : optimizers()) {
    TinyModel dense;
    const auto optimizer = make(tensors_of(dense.named()));
    for (int step = 0; step < 4; ++step) {
      for (int rank = 0; rank < 2; ++rank) add_gradient(language_loss(dense, rank, step), 0.5);
      optimizer->step();
      optimizer->zero_grad();
    }
    for (int stage = 0; stage <= 3; ++stage) {
      SCOPED_TRACE(cat(name, ", stage ", stage));
      run_ranks(2, [&](int rank, Communicator& comm) {
        RunOptions run;
        run.stage = stage;
        TinyModel model;
        const auto client = make(tensors_of(model.named()));
        auto options = small_buckets();
        options.groups = groups_of(*client, model.named());
        options.optimizer = wrap_torch_optimizer(client, model.named());
        Engine engine(model.named(), config_of(run, 2), share(comm), options);
        for (int step = 0; step < 4; ++step) {
          engine.backward(language_loss(model, rank, step));
          engine.step();
        }
        for (const auto& [key, value] : weights_of(engine, model)) {
          EXPECT_LE((value - dense.p.at(key)).abs().max().item<double>(), 1e-5) << key;
        }
        EXPECT_EQ(engine.optimizer()->step_count(0), 4);
        for (const auto& state : engine.optimizer()->state_names()) EXPECT_TRUE(engine.full_state(0, state).defined());
        engine.destroy();
      });
    }
  }
}

TEST(TorchOptimizer, AModuleOfTorchTrainsInBf16UnderStage3) {
  run_ranks(2, [](int rank, Communicator& comm) {
    RunOptions run;
    run.stage = 3;
    run.extra = R"(, "bf16": {"enabled": true})";
    torch::nn::Sequential net(torch::nn::Linear(8, 32), torch::nn::Tanh(), torch::nn::Linear(32, 4));
    NamedParameters parameters;
    int salt = 0;
    for (const auto& item : net->named_parameters()) {
      item.value().data().copy_(filled(item.value().sizes(), ++salt));
      parameters.emplace_back(item.key(), item.value());
    }
    auto client = std::make_shared<torch::optim::AdamW>(tensors_of(parameters), torch::optim::AdamWOptions(0.01));
    EngineOptions options;
    options.groups = groups_of(*client, parameters);
    options.optimizer = wrap_torch_optimizer(client, parameters);
    Engine engine(parameters, config_of(run, 2), share(comm), options);
    double first = 0, last = 0;
    for (int step = 0; step < 30; ++step) {
      const auto loss = net->forward(filled({16, 8}, rank).to(at::kBFloat16)).to(at::kFloat).sub(0.3).pow(2).mean();
      engine.backward(loss);
      engine.step();
      (step == 0 ? first : last) = loss.item<double>();
    }
    EXPECT_LT(last, first * 0.5);
    const auto master = engine.full_fp32_param(0);
    EXPECT_TRUE(at::equal(master.to(at::kBFloat16), parameters[0].second.detach().clone()));
    engine.destroy();
  });
}

TEST(TorchOptimizer, AForeignOptimizerIsRefused) {
  TinyModel model, other;
  const auto client = optimizers()[0].second(tensors_of(other.named()));
  EXPECT_THROW(wrap_torch_optimizer(client, model.named()), std::invalid_argument);
}

}  // namespace
}  // namespace unshard::testing
