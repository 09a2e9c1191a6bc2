// Facts about the update kernels alone: the same bits from every instruction set, alignment and piece split; nothing outside is written.
#include "unshard/optim/kernels.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "core/cpu_isa.h"
#include "optim/update.h"

namespace unshard::kernels {
namespace {

std::vector<const UpdateKernels*> tables() {
  std::vector<const UpdateKernels*> result{&update_kernels_portable()};
  if (selected_isa() >= Isa::avx2) result.push_back(&update_kernels_avx2());
  if (selected_isa() >= Isa::avx512) result.push_back(&update_kernels_avx512());
  return result;
}

Rule rule_of(int index) {
  const bool odd = index % 2 == 1;
  switch (index % 6) {
    case 0:
      return adam_rule({1e-3, 0.9, 0.999, 1e-8, 0.1, true, true, 3, 0.5});
    case 1:
      return adam_rule({1e-2, 0.3, 0.95, 1e-6, 0.1, false, odd, 1, 1});
    case 2:
      return sgd_rule(0.1, 0.9, 0, 0.01, true, false, 0.3);
    case 3:
      return sgd_rule(0.1, 0, 0, 0.01, false, true, 1);
    case 4:
      return adagrad_rule(0.01, 1e-10, 0.1, 0.7);
    default:
      return lion_rule(1e-3, 0.9, 0.99, 0.1, 0.5);
  }
}

/// The arrays of one update, at chosen offsets from their allocation, with guards behind and before.
struct Case {
  std::int64_t n;
  int offset;
  std::vector<float> master, first, second;
  std::vector<std::uint16_t> param;
  std::vector<float> grad32;
  std::vector<std::uint16_t> grad16;
  Element half, grad;
  bool has_param;
  static constexpr float kGuard = 123.5F;

  Case(std::int64_t n, int offset, Element half, Element grad, bool has_param, std::uint32_t seed)
      : n(n), offset(offset), half(half), grad(grad), has_param(has_param) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto size = static_cast<std::size_t>(n + offset + 20);
    for (auto* array : {&master, &first, &second, &grad32}) array->assign(size, kGuard);
    param.assign(size, 0x1234);
    grad16.assign(size, 0x1234);
    for (std::int64_t i = 0; i < n; ++i) {
      const auto at = static_cast<std::size_t>(i + offset);
      master[at] = normal(random);
      first[at] = normal(random) * 0.1F;
      second[at] = std::abs(normal(random)) * 0.1F;
      grad32[at] = i % 11 == 3 ? 0.0F : normal(random) * std::ldexp(1.0F, -static_cast<int>(random() % 30));
      grad16[at] = to_half(grad32[at], grad);
      param[at] = i % 13 == 5 ? to_half(normal(random), half) : to_half(master[at], half);  // now and then the user's edit
    }
  }
  static std::uint16_t to_half(float x, Element element) {
    std::uint16_t bits = 0;
    if (element == Element::f16) {
      const c10::Half h = x;
      std::memcpy(&bits, &h, 2);
    } else {
      const c10::BFloat16 b = x;
      std::memcpy(&bits, &b, 2);
    }
    return bits;
  }
  UpdateArrays arrays() {
    void* gradient = grad == Element::f32 ? static_cast<void*>(grad32.data() + offset) : grad16.data() + offset;
    return {master.data() + offset,
            {has_param ? param.data() + offset : nullptr, half},
            {gradient, grad},
            first.data() + offset,
            second.data() + offset};
  }
  /// Everything that may be written.
  std::vector<std::uint32_t> bits() const {
    std::vector<std::uint32_t> result;
    for (std::int64_t i = 0; i < n; ++i) {
      const auto at = static_cast<std::size_t>(i + offset);
      for (const float x : {master[at], first[at], second[at]}) result.push_back(__builtin_bit_cast(std::uint32_t, x));
      result.push_back(param[at]);
    }
    return result;
  }
  bool guards_kept() const {
    bool kept = true;
    for (std::size_t i = 0; i < master.size(); ++i) {
      if (i >= static_cast<std::size_t>(offset) && i < static_cast<std::size_t>(n + offset)) continue;
      kept = kept && master[i] == kGuard && first[i] == kGuard && second[i] == kGuard && param[i] == 0x1234;
    }
    return kept;
  }
};

TEST(UpdateKernels, GiveTheSameBitsInEveryInstructionSetAlignmentAndPieceSplit) {
  std::mt19937 random(1);
  for (int round = 0; round < 600; ++round) {
    const std::int64_t n = round < 100 ? round : static_cast<std::int64_t>(random() % 5000) + 1;
    const auto half = random() % 2 ? Element::bf16 : Element::f16;
    const auto grad = static_cast<Element>(random() % 3);
    const bool has_param = random() % 3 != 0;
    const Rule rule = rule_of(round);
    std::vector<std::uint32_t> wanted;
    for (const auto* kernels : tables()) {
      for (int repeat = 0; repeat < 2; ++repeat) {
        Case c(n, static_cast<int>(random() % 17), half, grad, has_param, round);
        const std::int64_t cut = repeat == 0 || n == 0 ? 0 : static_cast<std::int64_t>(random() % n);
        kernels->update(0, cut, c.arrays(), rule);
        kernels->update(cut, n, c.arrays(), rule);
        if (wanted.empty()) wanted = c.bits();
        ASSERT_EQ(c.bits(), wanted) << "round " << round << " n " << n << " cut " << cut;
        ASSERT_TRUE(c.guards_kept()) << "round " << round << " n " << n;
      }
    }
  }
}

TEST(UpdateKernels, AdamEqualsTheScalarFormulaBitForBit) {
  const AdamArgs args{1e-3, 0.9, 0.999, 1e-8, 0.1, true, true, 7, 0.25};
  const Rule r = adam_rule(args);
  for (const auto* kernels : tables()) {
    Case c(1000, 3, Element::bf16, Element::f32, true, 5), before = c;
    kernels->update(0, c.n, c.arrays(), r);
    for (std::size_t i = 3; i < 1003; ++i) {
      const bool edited = before.param[i] != Case::to_half(before.master[i], Element::bf16);
      const float p = edited ? __builtin_bit_cast(float, static_cast<std::uint32_t>(before.param[i]) << 16) : before.master[i];
      const float g = before.grad32[i] * 0.25F;
      const float m = std::fma(r.rest1, g - before.first[i], before.first[i]);
      const float v = std::fma(r.rest2 * g, g, r.beta2 * before.second[i]);
      const float q = p * r.keep - r.lr * m / std::fma(std::sqrt(v), r.inverse_root, r.eps);
      ASSERT_EQ(c.first[i], m);
      ASSERT_EQ(c.second[i], v);
      ASSERT_EQ(c.master[i], q);
      ASSERT_EQ(c.param[i], Case::to_half(q, Element::bf16));
    }
  }
}

TEST(UpdateKernels, ALionStepMovesEveryWeightByExactlyTheLearningRate) {
  std::vector<float> p(100, 1.0F), m(100, 0.0F), g(100, 1e-20F);
  g[1] = -1e-20F;
  g[2] = 0;
  lion(100, p.data(), {}, {g.data(), c10::ScalarType::Float}, m.data(), 0.25, 0.9, 0.99, 0, 1);
  EXPECT_EQ(p[0], 0.75F);
  EXPECT_EQ(p[1], 1.25F);
  EXPECT_EQ(p[2], 1.0F);
}

TEST(UpdateKernels, TheFirstMomentumStepTakesTheGradientAndLaterOnesAreDamped) {
  std::vector<float> p(20, 0.0F), buffer(20, 99.0F), g(20, 2.0F);
  const Array grad{g.data(), c10::ScalarType::Float};
  sgd(20, p.data(), {}, grad, buffer.data(), 0.5, 0.5, 0.5, 0, false, true, 1);
  EXPECT_EQ(buffer[19], 2.0F);
  EXPECT_EQ(p[19], -1.0F);
  sgd(20, p.data(), {}, grad, buffer.data(), 0.5, 0.5, 0.5, 0, false, false, 1);
  EXPECT_EQ(buffer[19], 2.0F);  // 0.5 * 2 + (1 - 0.5) * 2
  EXPECT_EQ(p[19], -2.0F);
}

TEST(UpdateKernels, RefuseWhatTheyCannotRead) {
  float x = 0;
  double d = 0;
  EXPECT_THROW(lion(1, &x, {}, {&d, c10::ScalarType::Double}, &x, 1, 0, 0, 0, 1), std::invalid_argument);
  EXPECT_THROW(lion(1, &x, {&x, c10::ScalarType::Float}, {&x, c10::ScalarType::Float}, &x, 1, 0, 0, 0, 1), std::invalid_argument);
  EXPECT_THROW(sgd(1, &x, {}, {&x, c10::ScalarType::Float}, nullptr, 1, 0.9, 0, 0, false, true, 1), std::invalid_argument);
  EXPECT_THROW(adam_rule({1e-3, 0.9, 0.999, 1e-8, 0, true, true, 0, 1}), std::invalid_argument);
}

}  // namespace
}  // namespace unshard::kernels
