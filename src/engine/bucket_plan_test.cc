#include "bucket_plan.h"

#include <gtest/gtest.h>

#include <random>

namespace unshard {
namespace {

std::vector<PlannedParameter> random_parameters(std::mt19937& random, int world) {
  std::vector<PlannedParameter> parameters;
  const int count = std::uniform_int_distribution(1, 30)(random);
  for (int id = 0; id < count; ++id) {
    const auto numel = std::uniform_int_distribution<std::int64_t>(0, 400)(random);
    const auto dtype = random() % 3 == 0 ? c10::ScalarType::BFloat16 : c10::ScalarType::Float;
    parameters.push_back({id, "p" + std::to_string(id), {numel, world}, dtype, random() % 5 != 0});
  }
  return parameters;
}

TEST(BucketPlan, EveryElementHasExactlyOnePlace) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const int world = 1 + static_cast<int>(random() % 5);
    const std::int64_t limit = 1 + static_cast<std::int64_t>(random() % 300);
    const auto parameters = random_parameters(random, world);
    const auto plan = plan_buckets(parameters, world, limit);
    std::vector<std::vector<int>> covered(parameters.size());
    for (std::size_t id = 0; id < parameters.size(); ++id) covered[id].assign(parameters[id].layout.shard_numel(), 0);
    for (const auto& bucket : plan.buckets) {
      std::int64_t offset = 0;
      EXPECT_LE(bucket.slice_numel, std::max<std::int64_t>(1, limit / world));
      for (const auto& member : bucket.members) {
        EXPECT_EQ(member.offset, offset);
        EXPECT_EQ(parameters[member.parameter].dtype, bucket.dtype);
        EXPECT_EQ(parameters[member.parameter].active, plan.spans[bucket.span].active);
        for (std::int64_t i = 0; i < member.count; ++i) ++covered[member.parameter].at(member.piece_begin + i);
        offset += member.count;
      }
      EXPECT_EQ(bucket.slice_numel, offset);
    }
    for (const auto& places : covered) {
      for (const int times : places) EXPECT_EQ(times, 1);
    }
  }
}

TEST(BucketPlan, PiecesAreContiguousInTheirSpan) {
  std::mt19937 random(8);
  for (int round = 0; round < 100; ++round) {
    const int world = 1 + static_cast<int>(random() % 4);
    const auto parameters = random_parameters(random, world);
    const auto plan = plan_buckets(parameters, world, 100);
    for (const auto& parameter : parameters) {
      std::int64_t expected = plan.span_offsets[parameter.id];
      for (const auto& place : plan.places[parameter.id]) {
        const auto& bucket = plan.buckets[place.bucket];
        EXPECT_EQ(bucket.span, plan.buckets[plan.places[parameter.id][0].bucket].span);
        EXPECT_EQ(bucket.span_offset + bucket.members[place.member].offset, expected);
        expected += bucket.members[place.member].count;
      }
      if (parameter.layout.numel > 0) {
        EXPECT_EQ(expected - plan.span_offsets[parameter.id], parameter.layout.shard_numel());
      }
    }
  }
}

TEST(BucketPlan, FollowsTheReverseOfRegistration) {
  std::vector<PlannedParameter> parameters;
  for (int id = 0; id < 4; ++id) parameters.push_back({id, "p", {10, 2}, c10::ScalarType::Float, true});
  const auto plan = plan_buckets(parameters, 2, 20);
  ASSERT_EQ(plan.buckets.size(), 2u);
  EXPECT_EQ(plan.buckets[0].members[0].parameter, 3);
  EXPECT_EQ(plan.buckets[1].members[1].parameter, 0);
}

}  // namespace
}  // namespace unshard
