// Stages, accumulation, ranks and transports against a dense reference and against each other.
#include "engine_testing.h"

namespace unshard::testing {
namespace {

class Training : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(Training, EveryStageEqualsDenseTrainingAndTheOthersBitForBit) {
  const auto [ranks, accumulation] = GetParam();
  RunOptions run;
  run.ranks = ranks;
  run.accumulation = accumulation;
  const auto dense = train_dense(run, tiny, language_loss);
  std::vector<RunResult> stages;
  for (run.stage = 0; run.stage <= 3; ++run.stage) {
    SCOPED_TRACE(cat("stage ", run.stage));
    stages.push_back(train(run, tiny, language_loss));
    expect_close(stages.back().weights, dense.weights);
    for (int r = 0; r < ranks; ++r) {
      for (std::size_t i = 0; i < dense.losses[r].size(); ++i) EXPECT_NEAR(stages.back().losses[r][i], dense.losses[r][i], 1e-5);
    }
    for (std::size_t i = 0; i < dense.norms[0].size(); ++i) EXPECT_NEAR(stages.back().norms[0][i], dense.norms[0][i], 1e-5);
    expect_same_bits(stages.back().weights, stages.front().weights);
    EXPECT_EQ(stages.back().losses, stages.front().losses);
    EXPECT_EQ(stages.back().norms, stages.front().norms);
  }
}

TEST_P(Training, UnsharedMemoryGivesTheSameBits) {
  const auto [ranks, accumulation] = GetParam();
  RunOptions run;
  run.ranks = ranks;
  run.accumulation = accumulation;
  const auto shared = train(run, tiny, language_loss);
  run.share_memory = false;
  for (run.stage = 0; run.stage <= 3; ++run.stage) {
    for (const char* overlap : {R"(, "overlap_comm": true)", R"(, "overlap_comm": false)"}) {
      SCOPED_TRACE(cat("stage ", run.stage, overlap));
      run.zero_extra = overlap;
      const auto unshared = train(run, tiny, language_loss);
      expect_same_bits(unshared.weights, shared.weights);
      EXPECT_EQ(unshared.losses, shared.losses);
      EXPECT_EQ(unshared.norms, shared.norms);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(RanksAndAccumulation, Training, ::testing::Combine(::testing::Values(1, 2, 4), ::testing::Values(1, 4)));

}  // namespace
}  // namespace unshard::testing
