// Training, evaluation and generation through an engine on several hosts: none disturbs another's plan.
#include "engine_testing.h"

namespace unshard {
namespace {

using testing::TinyModel;
using testing::tokens_of;

struct Trainer {
  TinyModel model;
  Engine engine;
  const int rank;

  Trainer(int rank, Communicator& comm, const testing::RunOptions& run)
      : engine(model.named(), testing::config_of(run, comm.world_size()), testing::share(comm), testing::small_buckets()), rank(rank) {}

  at::Tensor forward(int micro) {
    engine.begin_forward();
    auto loss = model.loss(tokens_of(rank, micro));
    engine.end_forward();
    return loss;
  }
  void train(int micro) {
    engine.backward(forward(micro));
    engine.step();
  }
  void evaluate(int batches) {
    const at::NoGradGuard no_grad;
    while (batches-- > 0) (void)forward(batches);
  }
  void generate(int tokens) {
    const at::NoGradGuard no_grad;
    while (tokens-- > 0) (void)model.hidden(tokens_of(rank, tokens));
  }
  std::int64_t outside_plan() const { return engine.store().stats().outside_plan; }
};

class EngineModes : public ::testing::TestWithParam<std::string> {};

TEST_P(EngineModes, EachHasItsPlanAtOnceWhenItsTurnComesAgain) {
  testing::RunOptions run;
  run.stage = 3;
  run.accumulation = 2;
  run.zero_extra = GetParam();
  CommOptions options;
  options.share_memory = true;
  testing::run_hosts({1, 2}, options, [&](int rank, Communicator& comm) {
    Trainer trainer(rank, comm, run);
    const auto round = [&](int first) {
      trainer.train(first);
      trainer.evaluate(2);  // between micro-batches
      trainer.train(first + 1);
      trainer.evaluate(1 + (rank + first) % 3);
      trainer.generate(2 + rank);
    };
    round(0);
    round(2);
    const auto before = trainer.outside_plan();
    round(4);
    round(6);
    EXPECT_EQ(trainer.outside_plan(), before);
    {
      const at::NoGradGuard no_grad;
      trainer.engine.begin_forward();
      (void)at::exp(trainer.model.p.at("down.weight"));  // plans were agreed: what isn't in them is counted
      trainer.engine.end_forward();
    }
    EXPECT_EQ(trainer.outside_plan(), before + 1);
    trainer.engine.destroy();
  });
}

INSTANTIATE_TEST_SUITE_P(Budgets, EngineModes, ::testing::Values(std::string(), std::string(R"(, "stage3_max_live_parameters": 120,
                           "stage3_prefetch_bucket_size": 60)")));

}  // namespace
}  // namespace unshard
