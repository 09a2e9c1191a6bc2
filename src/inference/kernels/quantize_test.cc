// Facts about rounding weights: what a file has in groups is taken over as it is, the rest is off by half a step at most, or by a fit that
// beats smallest and largest value; every instruction set makes the same bits.
#include "inference/kernels/quantize.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "inference/kernels/matrix_internal.h"
#include "inference/weights/gguf_blocks.h"
#include "inference/weights/half.h"

namespace unshard::inference {
namespace {

using Floats = std::vector<float>;

Floats random_floats(std::int64_t count, unsigned seed, float size) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.02F * size, size);
  Floats result(static_cast<std::size_t>(count));
  for (float& value : result) value = normal(random);
  return result;
}

constexpr std::int64_t kRows = 20, kCols = 512;

/// Random rows of a type: any bytes, with small fp16 numbers where blocks begin (all types here have theirs in front).
std::vector<std::uint8_t> random_blocks(FileType type) {
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(kRows * kCols / block_values(type) * block_bytes(type)));
  std::mt19937 random(3);
  for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random());
  const bool two = type == FileType::q4_1 || type == FileType::q4_k;
  for (std::size_t b = 0; b < bytes.size(); b += static_cast<std::size_t>(block_bytes(type))) {
    for (std::size_t n = 0; n < (two ? 2 : 1); ++n) {
      const std::uint16_t half = f16_of_float(0.001F * static_cast<float>(random() % 100) - 0.03F);
      std::memcpy(bytes.data() + b + 2 * n, &half, sizeof half);
    }
  }
  return bytes;
}

/// Largest |packed - file| over |file|'s largest of that row.
double worst_difference(const WeightView& view, WeightType type) {
  Workers workers(1);
  const Matrix matrix = Matrix::pack({&view, 1}, type, workers);
  Floats file(static_cast<std::size_t>(view.cols)), packed(file.size());
  double worst = 0;
  for (std::int64_t r = 0; r < view.rows; ++r) {
    expand_row(view, r, file.data());
    matrix.expand_row(r, packed.data());
    double largest = 1e-30, off = 0;
    for (std::int64_t i = 0; i < view.cols; ++i) {
      largest = std::max<double>(largest, std::abs(file[i]));
      off = std::max<double>(off, std::abs(packed[i] - file[i]));
    }
    worst = std::max(worst, off / largest);
  }
  return worst;
}

TEST(Quantize, GroupsOfAFileAreTakenOverExactly) {
  const auto check = [](FileType from, WeightType to) {
    const auto bytes = random_blocks(from);
    EXPECT_EQ(worst_difference({from, bytes.data(), kRows, kCols, "w"}, to), 0.0) << file_type_name(from) << " " << weight_type_name(to);
  };
  check(FileType::q4_0, WeightType::q4);
  check(FileType::q4_1, WeightType::q4);
  check(FileType::q8_0, WeightType::q8);
  check(FileType::q5_0, WeightType::q8);
  check(FileType::q4_0, WeightType::q8);
}

TEST(Quantize, Q4KIsTakenOverButForScalesInHalfPrecision) {
  const auto bytes = random_blocks(FileType::q4_k);
  // Scale times 15 and shift: each off by 2^-11 of itself at most; a row's largest value is near their difference or sum.
  const double off = worst_difference({FileType::q4_k, bytes.data(), kRows, kCols, "w"}, WeightType::q4);
  EXPECT_LT(off, 4 * 0x1p-11);
  EXPECT_GT(off, 0);
}

TEST(Quantize, FloatsAreOffByHalfAStep) {
  const Floats w = random_floats(kRows * kCols, 4, 0.05F);
  const WeightView view = {FileType::f32, w.data(), kRows, kCols, "w"};
  // A step is largest / 127 (of the group or row), plus the rounding of the scale to half precision, which q up to 127 multiplies.
  EXPECT_LE(worst_difference(view, WeightType::q8), 0.5 / 127 + 0x1p-11);
  EXPECT_LE(worst_difference(view, WeightType::w8a8), 0.5001 / 127);
  EXPECT_LE(worst_difference(view, WeightType::bf16), 0x1p-8);
  EXPECT_LE(worst_difference(view, WeightType::f16), 0x1p-11);
  EXPECT_EQ(worst_difference(view, WeightType::f32), 0.0);
}

/// Squared error of one group.
double error_of(const float* x, const StoredGroup& group) {
  double sum = 0;
  for (int i = 0; i < kGroup; ++i) {
    const double value = static_cast<double>(float_of_f16(group.scale)) * group.q[i] + float_of_f16(group.shift);
    sum += (x[i] - value) * (x[i] - value);
  }
  return sum;
}

TEST(Quantize, Int4BeatsSmallestAndLargestValueByATenth) {
  const Floats w = random_floats(256 * kGroup, 5, 0.05F);
  double fitted = 0, plain = 0;
  for (std::size_t g = 0; g < 256; ++g) {
    const float* x = w.data() + g * kGroup;
    StoredGroup group;
    current_kernels().round_q4(x, group);
    fitted += error_of(x, group);
    const auto [low, high] = std::minmax_element(x, x + kGroup);
    const float scale = (*high - *low) / 15;
    StoredGroup ends = {f16_of_float(scale), f16_of_float(*low), {}};
    for (int i = 0; i < kGroup; ++i) ends.q[i] = static_cast<std::uint8_t>(std::lround((x[i] - *low) / scale));
    plain += error_of(x, ends);
  }
  EXPECT_LT(fitted, 0.9 * plain);
}

TEST(Quantize, GroupsOfOneOrTwoValuesAreExact) {
  for (const float low : {0.0F, -0.25F, 0.5F}) {
    Floats x(kGroup, low);
    StoredGroup group;
    current_kernels().round_q4(x.data(), group);
    EXPECT_EQ(error_of(x.data(), group), 0.0);
    for (int i = 0; i < 10; ++i) x[i] = low + 0.9375F;  // 15 / 16: a step is 1 / 16
    current_kernels().round_q4(x.data(), group);
    EXPECT_LT(error_of(x.data(), group), 1e-6);
    current_kernels().round_q8(x.data(), group);
    EXPECT_LT(std::abs(float_of_f16(group.scale) * static_cast<float>(group.q[0] - 128) - x[0]), 1e-3);
  }
}

TEST(Quantize, EveryInstructionSetMakesTheSameBits) {
  Floats w = random_floats(300 * kGroup, 6, 0.05F);
  for (int i = 0; i < 3 * kGroup; ++i) w[i] *= i < kGroup ? 1e-9F : i < 2 * kGroup ? 1e-38F : 1e7F;
  const MatrixKernels& first = matrix_kernels_portable();
  for (const MatrixKernels* other : runnable_kernels()) {
    for (std::size_t g = 0; g < 300; ++g) {
      StoredGroup a, b;
      first.round_q4(w.data() + g * kGroup, a);
      other->round_q4(w.data() + g * kGroup, b);
      ASSERT_EQ(std::memcmp(&a, &b, sizeof a), 0) << other->name << " group " << g;
      first.round_q8(w.data() + g * kGroup, a);
      other->round_q8(w.data() + g * kGroup, b);
      ASSERT_EQ(std::memcmp(&a, &b, sizeof a), 0) << other->name << " group " << g;
    }
    std::vector<std::uint8_t> a(w.size()), b(w.size());
    ASSERT_EQ(first.round_bytes(w.data() + 96, 1003, a.data()), other->round_bytes(w.data() + 96, 1003, b.data()));
    ASSERT_EQ(a, b);
  }
}

TEST(Quantize, ANanWeightShowsInItsRow) {
  Workers workers(1);
  Floats w = random_floats(3 * kCols, 7, 0.05F), x(kCols, 1.0F), y(3);
  w[kCols + 70] = std::nanf("");
  const WeightView view = {FileType::f32, w.data(), 3, kCols, "w"};
  for (const WeightType type : {WeightType::q8, WeightType::q4, WeightType::w8a8, WeightType::bf16}) {
    Activations held;
    held.assign(x.data(), 1, kCols, kCols, type, workers);
    multiply(Matrix::pack({&view, 1}, type, workers), held, y.data(), 3, {}, workers);
    EXPECT_TRUE(std::isfinite(y[0]) && std::isnan(y[1]) && std::isfinite(y[2])) << weight_type_name(type);
  }
}

}  // namespace
}  // namespace unshard::inference
