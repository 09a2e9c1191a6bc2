#include "inference/kernels/rows.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "core/cpu_isa.h"
#include "inference/kernels/rows_kernels.h"

namespace unshard::inference {
namespace {

std::vector<const RowKernels*> tables() {
  std::vector<const RowKernels*> all = {&row_kernels_portable()};
  if (kernels::selected_isa() >= kernels::Isa::avx2) all.push_back(&row_kernels_avx2());
  if (kernels::selected_isa() >= kernels::Isa::avx512) all.push_back(&row_kernels_avx512());
  return all;
}

std::vector<float> normal(std::int64_t n, unsigned seed, float mean = 0) {
  std::mt19937 random(seed);
  std::normal_distribution<float> distribution(mean, 1);
  std::vector<float> values(static_cast<std::size_t>(n));
  for (auto& value : values) value = distribution(random);
  return values;
}

constexpr std::int64_t kWidths[] = {1, 2, 15, 16, 17, 63, 64, 65, 576, 4096 + 5};

TEST(Rows, RmsNormMatchesDoubles) {
  for (const RowKernels* kernels : tables()) {
    for (const auto width : kWidths) {
      for (const float offset : {0.0F, 1.0F}) {
        const auto x = normal(width, 1), weight = normal(width, 2);
        std::vector<float> out(x.size());
        kernels->rms_norm(x.data(), weight.data(), offset, 1e-5F, out.data(), width);
        double squares = 0;
        for (const double v : x) squares += v * v;
        const double scale = 1 / std::sqrt(squares / static_cast<double>(width) + 1e-5);
        for (std::size_t i = 0; i < x.size(); ++i) {
          const double wanted = x[i] * scale * (static_cast<double>(weight[i]) + offset);
          ASSERT_NEAR(out[i], wanted, 1e-6 * (std::abs(wanted) + std::abs(x[i] * scale))) << width << " at " << i;
        }
      }
    }
  }
}

TEST(Rows, LayerNormMatchesDoublesFarFromZeroToo) {
  for (const RowKernels* kernels : tables()) {
    for (const auto width : kWidths) {
      for (const float far : {0.0F, 100.0F}) {
        const auto x = normal(width, 3, far), weight = normal(width, 4), bias = normal(width, 5);
        std::vector<float> out(x.size()), plain(x.size());
        kernels->layer_norm(x.data(), weight.data(), bias.data(), 1e-5F, out.data(), width);
        kernels->layer_norm(x.data(), weight.data(), nullptr, 1e-5F, plain.data(), width);
        double mean = 0, squares = 0;
        for (const double v : x) mean += v / static_cast<double>(width);
        for (const double v : x) squares += (v - mean) * (v - mean);
        const double scale = 1 / std::sqrt(squares / static_cast<double>(width) + 1e-5);
        for (std::size_t i = 0; i < x.size(); ++i) {
          const double rest = (x[i] - mean) * scale * weight[i];
          // The mean is rounded to a float: 4e-6 of 100, times the scale (a row of one value: 300).
          const double tolerance = 2e-6 * (std::abs(rest) + 1) + far * 6e-8 * scale * 2 * std::abs(weight[i]);
          ASSERT_NEAR(out[i], rest + bias[i], tolerance) << width << " at " << i;
          ASSERT_NEAR(plain[i], rest, tolerance) << width << " at " << i;
        }
      }
    }
  }
}

TEST(Rows, NormsWorkInPlaceAndOverStridesAndTheNumberOfWorkersChangesNothing) {
  constexpr std::int64_t tokens = 37, width = 576, stride = 600;
  const auto x = normal(tokens * stride, 6), weight = normal(width, 7);
  Workers one(1), three(3, false);
  std::vector<float> apart(tokens * width), place = x;
  rms_norm(x.data(), stride, weight.data(), 0, 1e-6F, apart.data(), width, tokens, width, one);
  rms_norm(place.data(), stride, weight.data(), 0, 1e-6F, place.data(), stride, tokens, width, three);
  for (std::int64_t t = 0; t < tokens; ++t) {
    EXPECT_EQ(std::memcmp(&apart[t * width], &place[t * stride], width * sizeof(float)), 0);
    EXPECT_EQ(std::memcmp(&x[t * stride + width], &place[t * stride + width], (stride - width) * sizeof(float)), 0);
  }
  layer_norm(x.data(), stride, weight.data(), weight.data(), 1e-6F, apart.data(), width, tokens, width, one);
  place = x;
  layer_norm(place.data(), stride, weight.data(), weight.data(), 1e-6F, place.data(), stride, tokens, width, three);
  for (std::int64_t t = 0; t < tokens; ++t) EXPECT_EQ(std::memcmp(&apart[t * width], &place[t * stride], width * sizeof(float)), 0);
}

TEST(Rows, RopeTurnsHalfSplitPairsOfTheFirstFeaturesOnly) {
  constexpr std::int64_t positions = 50;
  Workers workers(2, false);
  for (const std::int64_t head_size : {32, 64, 80, 128}) {
    for (const std::int64_t rotary : {head_size, head_size / 2, std::int64_t{8}}) {
      const std::int64_t heads = 3, tokens = 9, stride = heads * head_size + 5, half = rotary / 2;
      std::vector<float> cos(positions * half), sin(positions * half);
      for (std::int64_t p = 0; p < positions; ++p)
        for (std::int64_t i = 0; i < half; ++i) {
          const double angle = static_cast<double>(p) * std::pow(10000.0, -static_cast<double>(i) / static_cast<double>(half));
          cos[p * half + i] = static_cast<float>(std::cos(angle));
          sin[p * half + i] = static_cast<float>(std::sin(angle));
        }
      const auto before = normal(tokens * stride, 8);
      auto x = before;
      std::vector<std::int32_t> at(tokens);
      for (std::int64_t t = 0; t < tokens; ++t) at[t] = static_cast<std::int32_t>((t * 7) % positions);
      rope(x.data(), stride, heads, head_size, rotary, at.data(), cos.data(), sin.data(), tokens, workers);
      for (std::int64_t t = 0; t < tokens; ++t)
        for (std::int64_t i = 0; i < stride; ++i) {
          const std::int64_t feature = i % head_size, pair = feature % half, index = t * stride + i;
          if (i >= heads * head_size || feature >= rotary) {
            ASSERT_EQ(x[index], before[index]);
            continue;
          }
          const double c = cos[at[t] * half + pair], s = sin[at[t] * half + pair];
          const double wanted =
              feature < half ? before[index] * c - before[index + half] * s : before[index] * c + before[index - half] * s;
          ASSERT_NEAR(x[index], wanted, 1e-6) << "head_size " << head_size << " rotary " << rotary << " feature " << feature;
        }
    }
  }
}

TEST(Rows, GeluMatchesDoublesOnBothSides) {
  std::vector<float> values;
  for (float x = -12; x <= 12; x += 1.0F / 512) values.push_back(x);
  for (const float x : {-1e4F, -30.0F, 1e-20F, -1e-20F, 30.0F, 1e4F, 3e38F}) values.push_back(x);
  for (const RowKernels* kernels : tables()) {
    auto exact = values, tanh = values;
    kernels->gelu(exact.data(), static_cast<std::int64_t>(values.size()), false);
    kernels->gelu(tanh.data(), static_cast<std::int64_t>(values.size()), true);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double x = values[i];
      const double wanted = 0.5 * x * std::erfc(-x / std::sqrt(2.0));
      const double u = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x), wanted_tanh = x / (1 + std::exp(-2 * u));
      ASSERT_NEAR(exact[i], wanted, 5e-7 * std::abs(wanted) + 1e-7) << x;
      ASSERT_NEAR(tanh[i], wanted_tanh, 5e-7 * std::abs(wanted_tanh) + 2e-7) << x;
    }
  }
}

TEST(Rows, ANaNStaysOneAndGeluSplitsWithoutChange) {
  for (const RowKernels* kernels : tables()) {
    float nan[2] = {std::nanf(""), std::nanf("")};
    kernels->gelu(nan, 1, false);
    kernels->gelu(nan + 1, 1, true);
    EXPECT_TRUE(std::isnan(nan[0]) && std::isnan(nan[1]));
  }
  Workers one(1), three(3, false);
  auto a = normal(100001, 9), b = a;
  gelu(a.data(), 100001, false, one);
  gelu(b.data(), 100001, false, three);
  EXPECT_EQ(a, b);
}

}  // namespace
}  // namespace unshard::inference
