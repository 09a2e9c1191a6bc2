// LAMB: equality with its formula in double, and of pieces with the whole.
#include "optim/lamb.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <barrier>
#include <cmath>
#include <thread>

namespace unshard {
namespace {

struct Reference {
  GroupOptions o;
  at::Tensor p, m, v;
  std::int64_t steps = 0;
  double coefficient = 0;

  void step(at::Tensor g) {
    ++steps;
    if (o.maximize) g = -g;
    m = o.beta1 * m + (1 - o.beta1) * g;
    v = o.beta2 * v + (1 - o.beta2) * g * g;
    const auto root = o.eps_inside_sqrt ? (v + o.eps).sqrt() : v.sqrt() + o.eps;
    const auto u = m / root + o.weight_decay * p;
    const double weights = p.norm().item<double>(), direction = u.norm().item<double>();
    coefficient = weights > 0 && direction > 0 ? std::clamp(weights / direction, o.min_coeff, o.max_coeff) : 1;
    const double correction = o.bias_correction ? std::sqrt(1 - std::pow(o.beta2, steps)) / (1 - std::pow(o.beta1, steps)) : 1;
    p = p - o.lr * correction * coefficient * u;
  }
};

GroupOptions variant(int index) {
  GroupOptions o;
  o.lr = index % 2 == 0 ? 1e-3 : 1e-2;
  o.weight_decay = index % 3 == 0 ? 0 : 0.1;
  o.bias_correction = index % 4 != 3;
  o.eps_inside_sqrt = index % 5 == 4;
  o.maximize = index % 7 == 6;
  if (index % 6 == 5) o.max_coeff = 0.5;
  if (index % 6 == 4) o.min_coeff = 20, o.max_coeff = 30;
  return o;
}

Reference reference_of(const GroupOptions& options, const at::Tensor& p) {
  const auto zero = at::zeros({p.numel()}, at::kDouble);
  return {options, p.to(at::kDouble), zero, zero};
}

TEST(Lamb, EqualsItsFormulaInDoubleForAllOptionsAndSizesAroundAChunk) {
  at::manual_seed(3);
  for (int index = 0; index < 42; ++index) {
    const std::int64_t n = index % 3 == 0 ? 1 + index : kLambChunk * (index % 3) + index - 20;
    const auto options = variant(index);
    const auto optimizer = make_optimizer("Lamb");
    at::Tensor p = at::randn({n}) * (index % 2 == 0 ? 1 : 1e-3);
    auto reference = reference_of(options, p);
    for (int step = 0; step < 6; ++step) {
      const at::Tensor grad = at::randn({n});
      optimizer->step({{0, 0, p, {}, grad}}, {options}, {0.5, {}});
      reference.step(grad.to(at::kDouble) * 0.5);
    }
    const double moved = (reference.p - p.to(at::kDouble)).abs().max().item<double>();
    EXPECT_LT(moved, 2e-6 * (1 + reference.p.abs().max().item<double>())) << "options " << index << ", " << n << " elements";
    EXPECT_EQ(optimizer->step_count(0), 6);
  }
}

TEST(Lamb, AParameterOfZerosMovesByItsDirectionAlone) {
  const GroupOptions options;
  const auto optimizer = make_optimizer("lamb");
  const at::Tensor p = at::zeros({5}), grad = at::ones({5});
  optimizer->step({{0, 0, p, {}, grad}}, {options}, {1, {}});
  auto reference = reference_of(options, at::zeros({5}));
  reference.step(at::ones({5}, at::kDouble));
  EXPECT_EQ(reference.coefficient, 1);
  EXPECT_TRUE(at::allclose(p.to(at::kDouble), reference.p, 1e-5, 0));
}

TEST(Lamb, A16BitParameterFollowsItsMasterAndTakesEdits) {
  const auto options = variant(1);
  const auto optimizer = make_optimizer("lamb");
  at::Tensor master = at::randn({300});
  at::Tensor p = master.to(at::kBFloat16);
  master[7] = 5;  // rounds to another value than p has: an edit of p wins
  const at::Tensor grad = at::randn({300});
  auto start = master.clone();
  start[7] = p[7].to(at::kFloat);
  auto reference = reference_of(options, start);
  optimizer->step({{0, 0, p, master, grad}}, {options}, {1, {}});
  reference.step(grad.to(at::kDouble));
  EXPECT_TRUE(at::allclose(master.to(at::kDouble), reference.p, 1e-5, 1e-6));
  EXPECT_TRUE(at::equal(p, master.to(at::kBFloat16)));
}

/// Three ranks hold uneven pieces (one has none of the second parameter) and agree on the norms.
TEST(Lamb, PiecesOnThreeRanksEqualTheWhole) {
  at::manual_seed(5);
  const std::vector<std::int64_t> sizes{1000, 7};
  const std::vector<std::vector<std::int64_t>> cuts{{0, 400, 990, 1000}, {0, 7, 7, 7}};
  const std::vector<GroupOptions> groups{variant(2)};
  std::vector<at::Tensor> whole, pieces, grads;
  for (const auto size : sizes) {
    whole.push_back(at::randn({size}));
    pieces.push_back(whole.back().clone());
    grads.push_back(at::randn({size}));
  }
  const auto dense = make_optimizer("lamb");
  std::vector<UpdateItem> all;
  for (int i = 0; i < 2; ++i) all.push_back({i, 0, whole[i], {}, grads[i]});

  std::barrier<> meet(3);
  std::vector<std::vector<double>> told(3);
  const auto rank = [&](int r) {
    const auto optimizer = make_optimizer("lamb");
    std::vector<UpdateItem> items;
    for (int i = 0; i < 2; ++i) {
      const auto part = [&](const at::Tensor& t) { return t.slice(0, cuts[i][r], cuts[i][r + 1]); };
      items.push_back({i, 0, part(pieces[i]), {}, part(grads[i])});
    }
    const auto sum = [&](std::vector<double>& values) {
      told[r] = values;
      meet.arrive_and_wait();
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = told[0][i] + told[1][i] + told[2][i];
      meet.arrive_and_wait();
    };
    for (int step = 0; step < 4; ++step) optimizer->step(items, groups, {1, sum});
  };
  std::vector<std::thread> ranks;
  for (int r = 0; r < 3; ++r) ranks.emplace_back(rank, r);
  for (auto& thread : ranks) thread.join();
  for (int step = 0; step < 4; ++step) dense->step(all, groups, {1, {}});
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(at::allclose(pieces[i], whole[i], 1e-6, 1e-7)) << "parameter " << i;
}

}  // namespace
}  // namespace unshard
