#pragma once
// A small language model made of ATen operators, and its dense training in one process, for the engine's tests.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/testing.h"
#include "unshard/comm/communicator.h"
#include "unshard/core/config.h"
#include "unshard/core/error.h"
#include "unshard/engine/engine.h"
#include "unshard/zero/parameter_store.h"

namespace unshard::testing {

/// Values from a formula, so that no random generator is shared between rank threads.
inline at::Tensor filled(at::IntArrayRef sizes, int salt, double size = 0.5) {
  auto tensor = at::empty(sizes, at::kFloat);
  auto* data = tensor.data_ptr<float>();
  for (std::int64_t i = 0; i < tensor.numel(); ++i)
    data[i] = static_cast<float>(size * std::sin(1.7 * static_cast<double>(i) + 0.37 * salt + 0.1));
  return tensor;
}

constexpr std::int64_t kVocab = 13, kHidden = 7, kWide = 10, kTokens = 6, kExperts = 4;

/// embedding -> layer norm -> linear -> gelu -> linear (+ residual) -> tied head; odd sizes, so that shards have padding.
struct TinyModel {
  std::map<std::string, at::Tensor> p;
  std::vector<std::string> order;

  TinyModel() {
    add("embed.weight", filled({kVocab, kHidden}, 1));
    add("norm.weight", at::ones({kHidden}));
    add("norm.bias", filled({kHidden}, 2, 0.1));
    add("up.weight", filled({kWide, kHidden}, 3));
    add("up.bias", filled({kWide}, 4, 0.1));
    add("down.weight", filled({kHidden, kWide}, 5));
    add("down.bias", filled({kHidden}, 6, 0.1));
    add("scale", filled({}, 7));
  }

  void add(const std::string& name, const at::Tensor& value) {
    p[name] = value.clone().set_requires_grad(true);
    order.push_back(name);
  }
  NamedParameters named() const {
    NamedParameters all;
    for (const auto& name : order) all.emplace_back(name, p.at(name));
    return all;
  }
  std::int64_t numel() const {
    std::int64_t total = 0;
    for (const auto& [name, tensor] : p) total += tensor.numel();
    return total;
  }

  at::Tensor hidden(const at::Tensor& tokens) const {
    const auto x = at::embedding(p.at("embed.weight"), tokens);
    const auto n = at::layer_norm(x, {kHidden}, p.at("norm.weight"), p.at("norm.bias"));
    const auto y = at::linear(at::gelu(at::linear(n, p.at("up.weight"), p.at("up.bias"))), p.at("down.weight"), p.at("down.bias"));
    return x + y * p.at("scale");
  }
  at::Tensor loss(const at::Tensor& tokens) const {
    const auto logits = at::linear(hidden(tokens), p.at("embed.weight"));  // tied
    return at::cross_entropy_loss(logits.slice(0, 0, kTokens - 1).to(at::kFloat), tokens.slice(0, 1, kTokens));
  }
};

inline at::Tensor tokens_of(int rank, int micro) {
  auto tokens = at::empty({kTokens}, at::kLong);
  for (std::int64_t i = 0; i < kTokens; ++i) tokens.data_ptr<std::int64_t>()[i] = (rank * 31 + micro * 17 + i * i * 5 + i) % kVocab;
  return tokens;
}

using Weights = std::map<std::string, at::Tensor>;

/// torch's own update operators on plain parameters.
class DenseTrainer {
 public:
  DenseTrainer(TinyModel& model, double lr, double weight_decay, bool sgd = false)
      : model_(model), lr_(lr), decay_(weight_decay), sgd_(sgd) {}

  /// One update with the gradients (already averaged) that lie on the parameters; absent ones are left alone.
  double update(double max_norm = 0) {
    double squares = 0;
    for (const auto& name : model_.order) {
      const auto& grad = model_.p.at(name).grad();
      if (grad.defined()) squares += grad.to(at::kDouble).pow(2).sum().item<double>();
    }
    const double norm = std::sqrt(squares);
    const double clip = max_norm > 0 ? 1 / std::max(1.0, (norm + 1e-6) / max_norm) : 1;
    const at::NoGradGuard no_grad;
    for (const auto& name : model_.order) {
      auto& parameter = model_.p.at(name);
      if (!parameter.grad().defined()) continue;
      auto grad = parameter.grad() * clip;
      auto& state = states_[name];
      ++state.steps;
      if (sgd_) {
        parameter.data().sub_(grad + parameter * decay_, lr_);
      } else {
        if (!state.exp_avg.defined()) state.exp_avg = at::zeros_like(parameter.data()), state.exp_avg_sq = at::zeros_like(parameter.data());
        state.exp_avg.mul_(0.9).add_(grad, 0.1);
        state.exp_avg_sq.mul_(0.999).addcmul_(grad, grad, 0.001);
        auto data = parameter.data();
        data.mul_(1 - lr_ * decay_);
        const auto denominator = (state.exp_avg_sq / (1 - std::pow(0.999, state.steps))).sqrt_().add_(1e-8);
        data.addcdiv_(state.exp_avg / (1 - std::pow(0.9, state.steps)), denominator, -lr_);
      }
      parameter.mutable_grad().reset();
    }
    return norm;
  }
  std::int64_t steps(const std::string& name) { return states_[name].steps; }

 private:
  struct State {
    std::int64_t steps = 0;
    at::Tensor exp_avg, exp_avg_sq;
  };
  TinyModel& model_;
  const double lr_, decay_;
  const bool sgd_;
  std::map<std::string, State> states_;
};

/// Add d(loss * factor) to the gradients.
inline void add_gradient(const at::Tensor& loss, double factor) { torch::autograd::backward({loss * factor}); }

/// run_ranks owns the communicator for as long as the rank runs.
inline std::shared_ptr<Communicator> share(Communicator& comm) {
  return {&comm, [](Communicator*) {}};
}

struct RunOptions {
  int stage = 0, accumulation = 1, ranks = 2, steps = 3;
  bool share_memory = true;
  double clipping = 0;
  std::string extra;       ///< more JSON, starting with a comma
  std::string zero_extra;  ///< more JSON in zero_optimization, starting with a comma
  GradientTuning tuning;
  bool sgd = false;
};

inline Config config_of(const RunOptions& run, int world) {
  ConfigContext context;
  context.world_size = world;
  return Config::from_json(cat(R"({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": )", run.accumulation,
                               R"(, "gradient_clipping": )", run.clipping, R"(, "optimizer": {"type": ")", run.sgd ? "SGD" : "AdamW",
                               R"(", "params": {"lr": 0.01, "weight_decay": 0.1}}, "zero_optimization": {"stage": )", run.stage,
                               R"(, "stage3_param_persistence_threshold": 8)", run.zero_extra, "}", run.extra, "}"),
                           context);
}

/// Small buckets, so that even this model has several.
inline EngineOptions small_buckets(GradientTuning tuning = {}) {
  EngineOptions options;
  options.gradients = std::move(tuning);
  if (options.gradients.bucket_numel == GradientTuning{}.bucket_numel) options.gradients.bucket_numel = 64;
  return options;
}

inline Weights weights_of(Engine& engine, const TinyModel& model) {
  Weights weights;
  for (const auto& name : model.order) weights[name] = engine.full_fp32_param(engine.store().find(model.p.at(name))).clone();
  return weights;
}

struct RunResult {
  Weights weights;                                 ///< rank 0's
  std::vector<std::vector<double>> losses, norms;  ///< by rank
};

/// Train `model()` with `loss_of(model, rank, micro)` and return what came out; checks that all ranks have the same weights.
using LossOf = std::function<at::Tensor(TinyModel&, int rank, int micro)>;
inline RunResult train(const RunOptions& run, const std::function<std::shared_ptr<TinyModel>()>& make, const LossOf& loss_of,
                       const std::function<void(Engine&, TinyModel&, int rank)>& at_end = {}) {
  RunResult result;
  result.losses.resize(run.ranks);
  result.norms.resize(run.ranks);
  std::vector<Weights> all(run.ranks);
  CommOptions comm_options;
  comm_options.share_memory = run.share_memory;
  run_ranks(run.ranks, comm_options, [&](int rank, Communicator& comm) {
    const auto model = make();
    Engine engine(model->named(), config_of(run, run.ranks), share(comm), small_buckets(run.tuning));
    for (int step = 0, micro = 0; step < run.steps; ++step) {
      for (int a = 0; a < run.accumulation; ++a, ++micro) {
        engine.begin_forward();
        const auto loss = loss_of(*model, rank, micro);
        engine.end_forward();
        engine.backward(loss);
        engine.step();
        result.losses[rank].push_back(loss.item<double>());
      }
      result.norms[rank].push_back(engine.last_grad_norm().value_or(-1));
    }
    all[rank] = weights_of(engine, *model);
    if (at_end) at_end(engine, *model, rank);
    engine.destroy();
  });
  for (int r = 1; r < run.ranks; ++r) {
    for (const auto& [name, value] : all[r]) EXPECT_TRUE(at::equal(value, all[0].at(name))) << name << " differs on rank " << r;
    EXPECT_EQ(result.norms[r], result.norms[0]);
  }
  result.weights = all[0];
  return result;
}

inline std::shared_ptr<TinyModel> tiny() { return std::make_shared<TinyModel>(); }
inline at::Tensor language_loss(TinyModel& model, int rank, int micro) { return model.loss(tokens_of(rank, micro)); }

/// The same in one process without an engine.
inline RunResult train_dense(const RunOptions& run, const std::function<std::shared_ptr<TinyModel>()>& make, const LossOf& loss_of) {
  const auto model = make();
  DenseTrainer trainer(*model, 0.01, 0.1, run.sgd);
  RunResult result;
  result.losses.resize(run.ranks);
  result.norms.resize(1);
  for (int step = 0; step < run.steps; ++step) {
    for (int a = 0; a < run.accumulation; ++a) {
      for (int rank = 0; rank < run.ranks; ++rank) {
        const auto loss = loss_of(*model, rank, step * run.accumulation + a);
        result.losses[rank].push_back(loss.item<double>());
        add_gradient(loss, 1.0 / (run.ranks * run.accumulation));
      }
    }
    result.norms[0].push_back(trainer.update(run.clipping));
  }
  for (const auto& name : model->order) result.weights[name] = model->p.at(name).detach().clone();
  return result;
}

inline void expect_close(const Weights& got, const Weights& want, double tolerance = 1e-5) {
  for (const auto& [name, value] : want) {
    const double difference = (got.at(name) - value).abs().max().item<double>();
    EXPECT_LE(difference, tolerance) << name;
  }
}
inline void expect_same_bits(const Weights& got, const Weights& want) {
  for (const auto& [name, value] : want) EXPECT_TRUE(at::equal(got.at(name), value)) << name;
}

}  // namespace unshard::testing
