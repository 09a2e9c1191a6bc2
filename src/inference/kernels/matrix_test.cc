// Facts about products: right for every shape, type and instruction set that runs here; a token's bits are the same alone, in a batch and
// with any number of workers.
#include "inference/kernels/matrix.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "inference/kernels/matrix_internal.h"
#include "inference/weights/half.h"

namespace unshard::inference {
namespace {

using Floats = std::vector<float>;

const std::vector<WeightType> kTypes = {WeightType::f32, WeightType::f16, WeightType::bf16,
                                        WeightType::q8,  WeightType::q4,  WeightType::w8a8};

Floats random_floats(std::int64_t count, unsigned seed, float size = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, size);
  Floats result(static_cast<std::size_t>(count));
  for (float& value : result) value = normal(random);
  return result;
}

WeightView view_of(const Floats& values, std::int64_t rows, std::int64_t cols) { return {FileType::f32, values.data(), rows, cols, "w"}; }

bool grouped(WeightType type) { return type == WeightType::q8 || type == WeightType::q4; }

/// Inputs as products of the type see them, written down a second time: rounded as the header says.
Floats rounded_inputs(Floats x, std::int64_t cols, WeightType type) {
  if (type == WeightType::bf16) {
    for (float& value : x) value = float_of_bf16(bf16_of_float(value));
  }
  const std::int64_t group = grouped(type) ? 32 : type == WeightType::w8a8 ? cols : 0;
  for (std::size_t begin = 0; group > 0 && begin < x.size(); begin += static_cast<std::size_t>(group)) {
    float largest = 0;
    for (std::int64_t i = 0; i < group; ++i) largest = std::max(largest, std::abs(x[begin + i]));
    for (std::int64_t i = 0; i < group; ++i)
      x[begin + i] = largest == 0 ? 0 : std::nearbyint(x[begin + i] * (127 / largest)) * (largest / 127);
  }
  return x;
}

Floats product(const Matrix& matrix, const Floats& x, std::int64_t tokens, WeightType type, Workers& workers,
               const Epilogue& epilogue = {}) {
  Activations held;
  held.assign(x.data(), tokens, matrix.cols(), matrix.cols(), type, workers);
  Floats y(static_cast<std::size_t>(tokens * matrix.rows()), 0.5F);
  multiply(matrix, held, y.data(), matrix.rows(), epilogue, workers);
  return y;
}

/// Largest |y - exact| in units of sum |w x| of that result.
double error_of(const Matrix& matrix, const Floats& x, std::int64_t tokens, const Floats& y) {
  const std::int64_t n = matrix.rows(), k = matrix.cols();
  Floats row(static_cast<std::size_t>(k));
  double worst = 0;
  for (std::int64_t r = 0; r < n; ++r) {
    matrix.expand_row(r, row.data());
    for (std::int64_t t = 0; t < tokens; ++t) {
      double exact = 0, size = 1e-30;
      for (std::int64_t i = 0; i < k; ++i) {
        const double term = static_cast<double>(row[i]) * x[t * k + i];
        exact += term;
        size += std::abs(term);
      }
      worst = std::max(worst, std::abs(y[t * n + r] - exact) / size);
    }
  }
  return worst;
}

class Products : public testing::TestWithParam<const MatrixKernels*> {
 protected:
  ScopedKernels scoped_{*GetParam()};
  Workers workers_{2};
};
INSTANTIATE_TEST_SUITE_P(Isa, Products, testing::ValuesIn(runnable_kernels()),
                         [](const auto& info) { return std::string(info.param->name); });

TEST_P(Products, EqualExactSumsForEveryTypeAndOddShapes) {
  struct Shape {
    std::int64_t n, k, tokens;
  };
  for (const WeightType type : kTypes) {
    for (const Shape s :
         {Shape{1, 32, 1}, {7, 64, 3}, {16, 32, 8}, {48, 96, 9}, {100, 160, 17}, {49, 1024, 5}, {17, 33, 2}, {5, 1, 4}, {65, 575, 33}}) {
      if (grouped(type) && s.k % 32 != 0) continue;
      const Floats w = random_floats(s.n * s.k, 1, 0.05F), x = random_floats(s.tokens * s.k, 2);
      const WeightView view = view_of(w, s.n, s.k);
      const Matrix matrix = Matrix::pack({&view, 1}, type, workers_);
      const Floats y = product(matrix, x, s.tokens, type, workers_);
      // k roundings of sums at most, each of 2^-24 of the sum of sizes; they cancel mostly, so that 2^-20 is generous.
      EXPECT_LT(error_of(matrix, rounded_inputs(x, s.k, type), s.tokens, y), 1e-6)
          << weight_type_name(type) << " [" << s.n << ", " << s.k << "] x " << s.tokens;
    }
  }
}

TEST_P(Products, SumsInPiecesOfKAreTheSame) {
  const std::int64_t n = 20, k = 16384, tokens = 11;
  const Floats w = random_floats(n * k, 1, 0.05F), x = random_floats(tokens * k, 2);
  const WeightView view = view_of(w, n, k);
  for (const WeightType type : kTypes) {
    const Matrix matrix = Matrix::pack({&view, 1}, type, workers_);
    EXPECT_LT(error_of(matrix, rounded_inputs(x, k, type), tokens, product(matrix, x, tokens, type, workers_)), 1e-6)
        << weight_type_name(type);
  }
}

TEST_P(Products, ATokensBitsAreTheSameAloneAndInABatch) {
  const std::int64_t n = 83, k = 256, tokens = 37;
  const Floats w = random_floats(n * k, 3, 0.05F), x = random_floats(tokens * k, 4);
  const WeightView view = view_of(w, n, k);
  Workers one(1), three(3);
  for (const WeightType type : kTypes) {
    const Matrix matrix = Matrix::pack({&view, 1}, type, workers_);
    const Floats all = product(matrix, x, tokens, type, workers_);
    EXPECT_EQ(product(matrix, x, tokens, type, one), all) << weight_type_name(type);
    EXPECT_EQ(product(matrix, x, tokens, type, three), all) << weight_type_name(type);
    for (std::int64_t count = 1; count <= 20; ++count) {
      for (std::int64_t first = 0; first + count <= tokens; first += count) {
        const Floats some(x.begin() + first * k, x.begin() + (first + count) * k);
        const Floats wanted(all.begin() + first * n, all.begin() + (first + count) * n);
        ASSERT_EQ(product(matrix, some, count, type, workers_), wanted) << weight_type_name(type) << " " << first << " + " << count;
      }
    }
  }
}

TEST_P(Products, BitsDoNotDependOnPiecesOfLongRows) {
  const std::int64_t n = 20, k = 19968, tokens = 70;
  const Floats w = random_floats(n * k, 3, 0.05F), x = random_floats(tokens * k, 4);
  const WeightView view = view_of(w, n, k);
  for (const WeightType type : kTypes) {
    if (GetParam()->name == std::string("portable")) continue;  // takes long there
    const Matrix matrix = Matrix::pack({&view, 1}, type, workers_);
    const Floats all = product(matrix, x, tokens, type, workers_);
    for (const std::int64_t t : {0, 7, 69}) {
      const Floats alone(x.begin() + t * k, x.begin() + (t + 1) * k), wanted(all.begin() + t * n, all.begin() + (t + 1) * n);
      ASSERT_EQ(product(matrix, alone, 1, type, workers_), wanted) << weight_type_name(type);
    }
  }
}

TEST_P(Products, AddBiasAndAccumulate) {
  const std::int64_t n = 70, k = 64, tokens = 3;
  const Floats w = random_floats(n * k, 5, 0.1F), x = random_floats(tokens * k, 6), bias = random_floats(n, 7);
  const WeightView view = view_of(w, n, k);
  for (const WeightType type : kTypes) {
    const Matrix matrix = Matrix::pack({&view, 1}, type, workers_);
    const Floats plain = product(matrix, x, tokens, type, workers_), both = product(matrix, x, tokens, type, workers_, {bias.data(), true});
    for (std::int64_t i = 0; i < tokens * n; ++i) ASSERT_EQ(both[i], (plain[i] + bias[i % n]) + 0.5F);
  }
}

double gated(double g, double u, Gate gate) {
  if (gate == Gate::silu) return g / (1 + std::exp(-g)) * u;
  if (gate == Gate::gelu) return 0.5 * g * std::erfc(-g / std::sqrt(2.0)) * u;
  return 0.5 * g * (1 + std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g))) * u;
}

TEST_P(Products, GatedOnesAreGateOfOneTimesTheOther) {
  for (const std::int64_t n : {1, 16, 40, 100}) {
    const std::int64_t k = 96, tokens = 9;
    const Floats wg = random_floats(n * k, 8, 0.3F), wu = random_floats(n * k, 9, 0.3F), x = random_floats(tokens * k, 10);
    const Floats bias = random_floats(2 * n, 11);
    for (const WeightType type : kTypes) {
      const WeightView views[] = {view_of(wg, n, k), view_of(wu, n, k)};
      const Matrix plain = Matrix::pack(views, type, workers_), fused = Matrix::pack_gated(views[0], views[1], type, workers_);
      const Floats sums = product(plain, x, tokens, type, workers_, {bias.data()});
      Activations held;
      held.assign(x.data(), tokens, k, k, type, workers_);
      for (const Gate gate : {Gate::silu, Gate::gelu_tanh, Gate::gelu}) {
        Floats y(static_cast<std::size_t>(tokens * n));
        multiply_gated(fused, held, gate, y.data(), n, {bias.data()}, workers_);
        for (std::int64_t i = 0; i < tokens * n; ++i) {
          const double g = sums[i / n * 2 * n + i % n], u = sums[i / n * 2 * n + n + i % n];
          ASSERT_NEAR(y[i], gated(g, u, gate), 2e-6 * (1 + std::abs(g * u)))
              << weight_type_name(type) << " " << n << " gate " << static_cast<int>(gate);
        }
      }
      Floats a(k), b(k);
      for (const std::int64_t r : {std::int64_t{0}, n - 1, n, 2 * n - 1}) {
        plain.expand_row(r, a.data());
        fused.expand_row(r, b.data());
        ASSERT_EQ(a, b);
      }
    }
  }
}

TEST_P(Products, RowsOfSeveralPartsFollowOneAnother) {
  const std::int64_t k = 64;
  const Floats w = random_floats(50 * k, 12);
  const WeightView whole = view_of(w, 50, k);
  const WeightView parts[] = {
      view_of(w, 9, k), {FileType::f32, w.data() + 9 * k, 3, k, "b"}, {FileType::f32, w.data() + 12 * k, 38, k, "c"}};
  const Floats x = random_floats(k, 13);
  for (const WeightType type : kTypes) {
    const Matrix a = Matrix::pack({&whole, 1}, type, workers_), b = Matrix::pack(parts, type, workers_);
    EXPECT_EQ(product(a, x, 1, type, workers_), product(b, x, 1, type, workers_));
  }
}

TEST_P(Products, NanInputsShowInTheirTokenOnly) {
  const std::int64_t n = 33, k = 64;
  const Floats w = random_floats(n * k, 14);
  const WeightView view = view_of(w, n, k);
  for (const float bad : {std::nanf(""), INFINITY}) {
    Floats x = random_floats(2 * k, 15);
    x[k + 40] = bad;
    for (const WeightType type : kTypes) {
      const Floats y = product(Matrix::pack({&view, 1}, type, workers_), x, 2, type, workers_);
      for (std::int64_t r = 0; r < n; ++r) {
        ASSERT_TRUE(std::isfinite(y[r])) << weight_type_name(type);
        ASSERT_FALSE(std::isfinite(y[n + r])) << weight_type_name(type);
      }
    }
  }
}

TEST_P(Products, ZeroInputsGiveZero) {
  const Floats w = random_floats(20 * 64, 16), x(3 * 64, 0.0F);
  const WeightView view = view_of(w, 20, 64);
  for (const WeightType type : kTypes) {
    for (const float y : product(Matrix::pack({&view, 1}, type, workers_), x, 3, type, workers_)) ASSERT_EQ(y, 0.0F);
  }
}

TEST(Matrix, RefusesPartsThatDoNotFit) {
  Workers workers(1);
  const Floats w(64 * 64);
  const WeightView parts[] = {view_of(w, 4, 64), view_of(w, 4, 32)}, odd = view_of(w, 4, 40);
  EXPECT_THROW(Matrix::pack(parts, WeightType::f32, workers), std::invalid_argument);
  EXPECT_THROW(Matrix::pack({&odd, 1}, WeightType::q4, workers), std::invalid_argument);
  EXPECT_THROW(Matrix::pack_gated(view_of(w, 4, 32), view_of(w, 5, 32), WeightType::f32, workers), std::invalid_argument);
  const Matrix matrix = Matrix::pack({&odd, 1}, WeightType::f32, workers);
  Activations x;
  x.assign(w.data(), 1, 64, 64, WeightType::f32, workers);
  Floats y(4);
  EXPECT_THROW(multiply(matrix, x, y.data(), 4, {}, workers), std::invalid_argument);
}

}  // namespace
}  // namespace unshard::inference
