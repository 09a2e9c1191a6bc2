// The schedules against curves recorded from DeepSpeed 0.19.8 on CPU: AdamW with lr 3e-3, the value before the first update and after each.
#include "unshard/optim/lr_schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "unshard/core/error.h"

namespace unshard {
namespace {

using ::testing::HasSubstr;

struct Curve {
  const char *type, *params;
  std::vector<double> lr, momentum;  // momentum is empty where the schedule leaves it alone
};

// clang-format off
const Curve kRecorded[] = {
    {"WarmupLR",
     R"({"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-2, "warmup_num_steps": 6})",
     {1e-05, 1e-05, 0.00387465954427307, 0.006135340455726929, 0.00773931908854614, 0.008983461573022232, 0.009999999999999998, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01},
     {}},
    {"WarmupLR",
     R"({"warmup_min_lr": 1e-3, "warmup_max_lr": 2e-2, "warmup_num_steps": 5, "warmup_type": "linear"})",
     {0.001, 0.001, 0.0048000000000000004, 0.0086, 0.012399999999999998, 0.0162, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02},
     {}},
    {"WarmupDecayLR",
     R"({"total_num_steps": 10, "warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"})",
     {0, 0.0, 0.0025, 0.005, 0.0075, 0.01, 0.008333333333333333, 0.006666666666666666, 0.005, 0.003333333333333333, 0.0016666666666666666, 0.0, 0.0, 0.0},
     {}},
    {"WarmupCosineLR",
     R"({"total_num_steps": 12, "warmup_num_steps": 4, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.05})",
     {0.0, 0.00030000000000000003, 0.0016500000000000002, 0.002439699375973561, 0.003, 0.0028915283338285837, 0.0025826271631908303, 0.002120323891120253, 0.001575, 0.001029676108879747, 0.0005673728368091698, 0.0002584716661714164, 0.00015000000000000001, 0.00015000000000000001},
     {}},
    {"OneCycle",
     R"({"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 4, "cycle_second_step_size": 5, "decay_lr_rate": 0.1, "decay_step_size": 2, "cycle_min_mom": 0.8, "cycle_max_mom": 0.95, "decay_mom_rate": 0.05})",
     {0.001, 0.003250000000000001, 0.005500000000000002, 0.00775, 0.010000000000000002, 0.0082, 0.006400000000000002, 0.004600000000000002, 0.002800000000000001, 0.001, 0.0009523809523809524, 0.0009090909090909091, 0.0008695652173913044, 0.0008333333333333334},
     {0.8, 0.9125, 0.875, 0.8375, 0.8, 0.8300000000000001, 0.86, 0.89, 0.9199999999999999, 0.95, 0.9737499999999999, 0.9974999999999999, 1.02125, 1.045}},
    {"OneCycle",
     R"({"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 4, "cycle_second_step_size": 6, "cycle_first_stair_count": 2, "cycle_second_stair_count": 3})",
     {0.001, 0.001, 0.0055000000000000005, 0.0055000000000000005, 0.010000000000000002, 0.007, 0.007, 0.004, 0.004, 0.001, 0.001, 0.001},
     {0.8, 0.9, 0.8500000000000001, 0.8500000000000001, 0.8, 0.8333333333333334, 0.8333333333333334, 0.8666666666666667, 0.8666666666666667, 0.9, 0.9, 0.9}},
    {"OneCycle",
     R"({"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3, "cycle_second_step_size": 5, "cycle_first_stair_count": 2, "decay_step_size": 2, "decay_lr_rate": 0.5})",
     {0.001, 0.001, 0.0055000000000000005, 0.010000000000000002, 0.0055000000000000005, 0.0055000000000000005, 0.001, 0.001, 0.001, 0.0008, 0.0006666666666666666},
     {0.8, 0.9, 0.8500000000000001, 0.8, 0.8500000000000001, 0.8500000000000001, 0.9, 0.9, 0.9, 0.9, 0.9}},
    {"OneCycle",
     R"({"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3, "cycle_second_step_size": 0})",
     {0.001, 0.004, 0.006999999999999999, 0.001, 0.001},
     {0.8, 0.8666666666666667, 0.8333333333333334, 0.9, 0.9}},
    {"LRRangeTest",
     R"({"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 3, "lr_range_test_step_rate": 0.5, "lr_range_test_staircase": true})",
     {0.0001, 0.0001, 0.0001, 0.00015000000000000001, 0.00015000000000000001, 0.00015000000000000001, 0.0002, 0.0002, 0.0002, 0.00025, 0.00025, 0.00025, 0.00030000000000000003, 0.00030000000000000003},
     {}},
};
// clang-format on

TEST(LrSchedule, EqualsTheRecordedCurves) {
  for (const auto& curve : kRecorded) {
    const auto schedule = make_lr_schedule(curve.type, curve.params, 3e-3, 1);
    EXPECT_EQ(schedule->type(), curve.type);
    for (std::size_t updates = 0; updates < curve.lr.size(); ++updates) {
      const auto value = schedule->value(static_cast<std::int64_t>(updates), 0, 3e-3);
      EXPECT_NEAR(value.lr.value(), curve.lr[updates], 1e-15) << curve.params << " after " << updates << " updates";
      ASSERT_EQ(value.momentum.has_value(), !curve.momentum.empty()) << curve.type;
      if (curve.momentum.empty()) continue;
      EXPECT_NEAR(*value.momentum, curve.momentum[updates], 1e-12) << curve.type << " after " << updates << " updates";
      EXPECT_EQ(value.second_beta, 0.99);
    }
  }
}

double lr_of(const char* type, const char* params, std::int64_t updates, double base = 3e-3, int group = 0, int groups = 1) {
  return make_lr_schedule(type, params, base, groups)->value(updates, group, base).lr.value();
}

TEST(LrSchedule, WarmupLrWithoutMaximumReachesTheOptimizersOwnRate) {
  EXPECT_EQ(lr_of("WarmupLR", R"({"warmup_num_steps": 10})", 100, 0.25), 0.25);
  EXPECT_EQ(lr_of("WarmupLR", R"({"warmup_num_steps": 10, "warmup_max_lr": null})", 100, 0.25), 0.25);
  EXPECT_EQ(lr_of("WarmupDecayLR", R"({"total_num_steps": 100, "warmup_num_steps": 10, "warmup_type": "linear"})", 11, 0.25), 1e-3);
}

TEST(LrSchedule, OneWarmupStepCountsAsTwo) {
  for (const std::int64_t updates : {0, 1, 2, 3}) {
    EXPECT_EQ(lr_of("WarmupLR", R"({"warmup_num_steps": 1})", updates), lr_of("WarmupLR", R"({"warmup_num_steps": 2})", updates));
  }
}

TEST(LrSchedule, AListGivesEachGroupItsOwnRates) {
  const char* params = R"({"warmup_min_lr": [0, 0.5], "warmup_max_lr": [1, 2], "warmup_num_steps": 4, "warmup_type": "linear"})";
  EXPECT_EQ(lr_of("WarmupLR", params, 3, 0, 0, 2), 0.5);
  EXPECT_EQ(lr_of("WarmupLR", params, 3, 0, 1, 2), 1.25);
  EXPECT_EQ(lr_of("OneCycle", R"({"cycle_min_lr": [1, 2], "cycle_max_lr": [3, 8], "cycle_first_step_size": 2})", 2, 0, 1, 2), 8);
  EXPECT_EQ(lr_of("LRRangeTest", R"({"lr_range_test_min_lr": [1, 2], "lr_range_test_step_size": 2})", 1, 0, 1, 2), 3);
}

TEST(LrSchedule, LastBatchIterationContinuesACurveAfterOneUpdateAtTheOptimizersOwnRate) {
  const auto continued = make_lr_schedule("WarmupLR", R"({"warmup_num_steps": 9, "last_batch_iteration": 2})", 3e-3, 1);
  EXPECT_FALSE(continued->value(0, 0, 3e-3).lr.has_value());
  for (std::int64_t updates = 1; updates < 5; ++updates) {
    EXPECT_EQ(lr_of("WarmupLR", R"({"warmup_num_steps": 9, "last_batch_iteration": 2})", updates),
              lr_of("WarmupLR", R"({"warmup_num_steps": 9})", updates + 3));
  }
}

TEST(LrSchedule, OneCycleLeavesMomentumAloneWhenToldAndDoesNotDecayByDefault) {
  const auto schedule =
      make_lr_schedule("OneCycle", R"({"cycle_min_lr": 1, "cycle_max_lr": 2, "cycle_first_step_size": 3, "cycle_momentum": false})", 1, 1);
  EXPECT_FALSE(schedule->value(2, 0, 1).momentum.has_value());
  EXPECT_EQ(schedule->value(3, 0, 1).lr, 2);
  EXPECT_EQ(schedule->value(6, 0, 1).lr, 1);
  EXPECT_EQ(schedule->value(1000, 0, 1).lr, 1);
}

std::string error_of(const char* type, const char* params) {
  try {
    make_lr_schedule(type, params, 1e-3, 2);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(LrSchedule, ErrorsNameTheKeyTheValueAndTheWayOut) {
  EXPECT_THAT(error_of("WarmupRL", "{}"), HasSubstr("did you mean \"WarmupLR\""));
  EXPECT_THAT(error_of("WarmupLR", R"({"warmup_nun_steps": 3})"), HasSubstr("did you mean \"warmup_num_steps\""));
  EXPECT_THAT(error_of("WarmupLR", R"({"warmup_num_steps": 0})"), HasSubstr("\"warmup_num_steps\" is 0"));
  EXPECT_THAT(error_of("WarmupLR", R"({"warmup_num_steps": 2.5})"), HasSubstr("whole number"));
  EXPECT_THAT(error_of("WarmupLR", R"({"warmup_type": "cosine"})"), HasSubstr("\"linear\""));
  EXPECT_THAT(error_of("WarmupLR", R"({"warmup_max_lr": "auto"})"), HasSubstr("auto"));
  EXPECT_THAT(error_of("WarmupLR", R"({"warmup_max_lr": [1, 2, 3]})"), HasSubstr("2 parameter groups"));
  EXPECT_THAT(error_of("WarmupDecayLR", "{}"), HasSubstr("\"total_num_steps\" is missing"));
  EXPECT_THAT(error_of("WarmupCosineLR", R"({"total_num_steps": 9, "cos_min_ratio": 2})"), HasSubstr("[0, 1]"));
  EXPECT_THAT(error_of("OneCycle", R"({"cycle_min_lr": 1})"), HasSubstr("\"cycle_max_lr\" is missing"));
  EXPECT_FALSE(is_known_lr_schedule("StepLR"));
  EXPECT_TRUE(is_known_lr_schedule("OneCycle"));
  EXPECT_EQ(make_lr_schedule("warmuplr", "{}", 1e-3, 1)->type(), "WarmupLR");  // names are known in any case, like the optimizers'
}

}  // namespace
}  // namespace unshard
