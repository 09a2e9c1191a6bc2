// The recorded behaviour: log2 of the scale after each call, window 4, hysteresis 2.
#include "unshard/optim/loss_scaler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

namespace unshard {
namespace {

std::vector<int> run(LossScaler& scaler, const std::string& overflows) {
  std::vector<int> powers;
  for (const char c : overflows) {
    scaler.update(c == '1');
    powers.push_back(static_cast<int>(std::log2(scaler.scale())));
  }
  return powers;
}
LossScalerOptions window_of_four() {
  LossScalerOptions options;
  options.window = 4;
  return options;
}

TEST(LossScaler, GrowsFirstAfterWindowPlusOneCalls) {
  LossScaler scaler(window_of_four());
  EXPECT_EQ(run(scaler, "0000000000"), (std::vector<int>{16, 16, 16, 16, 17, 17, 17, 17, 18, 18}));
}

TEST(LossScaler, HysteresisIsSpentOnceAndRefilledByGrowth) {
  LossScaler scaler(window_of_four());
  EXPECT_EQ(run(scaler, "1110000001011"), (std::vector<int>{16, 15, 14, 14, 14, 14, 14, 15, 15, 15, 15, 14, 13}));
}

TEST(LossScaler, ConsecutiveHysteresisIsRefilledByEveryGoodStep) {
  auto options = window_of_four();
  options.consecutive_hysteresis = true;
  LossScaler scaler(options);
  EXPECT_EQ(run(scaler, "101011"), (std::vector<int>{16, 16, 16, 16, 16, 15}));
}

TEST(LossScaler, AnOverflowAtTheMinimumRaisesAndSaysWhatToDo) {
  LossScalerOptions options;
  options.initial_scale_power = 1;
  options.hysteresis = 1;
  LossScaler scaler(options);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 1);
  try {
    scaler.update(true);
    FAIL() << "no error";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("minimum"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("bf16"), std::string::npos);
  }
}

TEST(LossScaler, HalvingStopsAtTheMinimum) {
  LossScalerOptions options;
  options.initial_scale_power = 3;
  options.hysteresis = 1;
  options.min_scale = 3;
  LossScaler scaler(options);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 4);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 3);
}

TEST(LossScaler, AStaticScaleNeverMoves) {
  LossScalerOptions options;
  options.static_scale = 128;
  LossScaler scaler(options);
  EXPECT_FALSE(scaler.dynamic());
  for (const bool overflow : {true, true, true, false, false}) scaler.update(overflow);
  EXPECT_EQ(scaler.scale(), 128);
}

TEST(LossScaler, ASavedStateContinuesAsIfNeverInterrupted) {
  const std::string before = "0010011", after = "0000001000000011";
  LossScaler whole(window_of_four()), first(window_of_four()), second(window_of_four());
  const auto all = run(whole, before + after);
  run(first, before);
  second.set_state(first.state());
  EXPECT_EQ(run(second, after), std::vector<int>(all.begin() + static_cast<std::ptrdiff_t>(before.size()), all.end()));
}

TEST(LossScaler, ImpossibleOptionsAreRefused) {
  for (int field = 0; field < 4; ++field) {
    LossScalerOptions options;
    if (field == 0) options.window = 0;
    if (field == 1) options.hysteresis = 0;
    if (field == 2) options.min_scale = 0;
    if (field == 3) options.initial_scale_power = -1;
    EXPECT_THROW(LossScaler{options}, std::invalid_argument) << field;
  }
}

}  // namespace
}  // namespace unshard
