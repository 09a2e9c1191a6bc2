// Facts about cuts and draws: against a plain sort, for logits of every shape.
#include "inference/sample/candidates.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "core/cpu_isa.h"
#include "inference/sample/draw.h"

namespace unshard::inference {
namespace {

const SampleKernels& kernels_here() { return kernels::select_table(sample_kernels_portable, sample_kernels_avx2, sample_kernels_avx512); }

/// Logits, their lanes' maxima, and the order of a plain sort.
struct Case {
  explicit Case(std::vector<float> values)
      : logits(std::move(values)), maxima(static_cast<std::size_t>(sample_chunks(size()) * kSampleLanes)) {
    kernels_here().scan(logits.data(), size(), nullptr, maxima.data());
    largest = *std::max_element(logits.begin(), logits.end());
    order.resize(logits.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(
        order, [&](std::int32_t a, std::int32_t b) { return logits[static_cast<std::size_t>(a)] > logits[static_cast<std::size_t>(b)]; });
  }
  std::int64_t size() const { return static_cast<std::int64_t>(logits.size()); }
  double weight(std::int32_t id) const { return std::exp(static_cast<double>(logits[static_cast<std::size_t>(id)]) - largest); }
  std::vector<float> logits, maxima;
  std::vector<std::int32_t> order;
  float largest = 0;
};

std::vector<Case> cases() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<Case> result;
  for (const std::size_t n : {1, 5, 256, 257, 3000, 20000}) {
    std::vector<float> flat(n), peaked(n), equal(n, 2.5F), steps(n), wild(n);
    for (std::size_t i = 0; i < n; ++i) {
      flat[i] = normal(random);
      peaked[i] = -2 * std::log(1 + static_cast<float>(random() % n));
      steps[i] = static_cast<float>(random() % 4);
      wild[i] = (random() % 2 ? 1 : -1) * std::exp(normal(random) * 20);
    }
    for (const auto* values : {&flat, &peaked, &equal, &steps, &wild}) result.emplace_back(*values);
  }
  return result;
}

std::vector<std::int32_t> sorted_ids(const Candidates& candidates) {
  std::vector<std::int32_t> ids;
  for (std::int64_t i = 0; i < candidates.count(); ++i) ids.push_back(candidates.id(i));
  std::ranges::sort(ids);
  return ids;
}
std::vector<std::int32_t> first_sorted(const Case& c, std::int64_t count) {
  std::vector<std::int32_t> ids(c.order.begin(), c.order.begin() + count);
  std::ranges::sort(ids);
  return ids;
}

TEST(Candidates, KeepCountLeavesWhatASortPutsFirst) {
  for (const Case& c : cases()) {
    Candidates candidates(kernels_here(), c.size());
    for (const std::int64_t k : {1, 2, 50, 256, 1000, 19999}) {
      if (k > c.size()) continue;
      candidates.gather_best(c.logits.data(), c.size(), c.maxima.data(), k, c.largest, 1);
      ASSERT_GE(candidates.count(), k);
      candidates.keep_count(k);
      EXPECT_EQ(sorted_ids(candidates), first_sorted(c, k)) << "k " << k << " of " << c.size();
      candidates.sort();
      for (std::int64_t i = 0; i < k; ++i) ASSERT_EQ(candidates.id(i), c.order[static_cast<std::size_t>(i)]);
    }
  }
}

TEST(Candidates, GatherBestLooksAtFewMoreThanItMust) {
  std::vector<float> flat(50000);
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (auto& x : flat) x = normal(random);
  const Case c(flat);
  Candidates candidates(kernels_here(), c.size());
  candidates.gather_best(c.logits.data(), c.size(), c.maxima.data(), 50, c.largest, 1);
  EXPECT_LE(candidates.count(), 75);
}

TEST(Candidates, KeepMassLeavesTheFewestThatReachIt) {
  for (const Case& c : cases()) {
    Candidates candidates(kernels_here(), c.size());
    double total = 0;
    for (const auto id : c.order) total += c.weight(id);
    for (const double p : {1e-9, 0.1, 0.5, 0.9, 0.999}) {
      candidates.gather(c.logits.data(), c.size(), c.maxima.data(), -3e38F, c.largest, 1);
      candidates.keep_mass(p * total);
      // Sums in single precision: the end may lie where a sort in double precision has it for p moved by 1e-6.
      double sum = 0;
      std::int64_t least = 0, most = 0;
      for (const auto id : c.order) {
        least += sum < (p - 1e-6) * total;
        most += sum < (p + 1e-6) * total;
        sum += c.weight(id);
      }
      least = std::max<std::int64_t>(least, 1);
      EXPECT_GE(candidates.count(), least) << "p " << p << " of " << c.size();
      EXPECT_LE(candidates.count(), most) << "p " << p << " of " << c.size();
      EXPECT_EQ(sorted_ids(candidates), first_sorted(c, candidates.count()));
    }
  }
}

TEST(Candidates, KeepMassIsExactWhereSumsAre) {
  const Case c(std::vector<float>(1000, 2.5F));
  Candidates candidates(kernels_here(), 1000);
  for (const std::int64_t n : {1, 500, 999, 1000}) {
    candidates.gather(c.logits.data(), 1000, c.maxima.data(), -3e38F, c.largest, 1);
    candidates.keep_mass(static_cast<double>(n));
    EXPECT_EQ(candidates.count(), n);
  }
}

TEST(Draw, EveryWeightHasItsShareOfTheUnitIntervalUpToItsEnd) {
  const std::vector<float> weights{0, 1, 0, 2, 5, 0};
  const auto at = [&](double u) { return pick_element(weights, u); };
  EXPECT_EQ(at(0), 1u);
  EXPECT_EQ(at(0.1249), 1u);
  EXPECT_EQ(at(0.125), 3u);
  EXPECT_EQ(at(0.3749), 3u);
  EXPECT_EQ(at(0.375), 4u);
  EXPECT_EQ(at(1 - 0x1p-53), 4u);
  EXPECT_EQ(at(1), 4u);
  const std::vector<double> sums{0, 1, 0, 3, 0};
  EXPECT_EQ(pick_chunk(sums, 0).chunk, 1u);
  EXPECT_EQ(pick_chunk(sums, 0.25).chunk, 3u);
  EXPECT_EQ(pick_chunk(sums, 0.25).share, 0);
  EXPECT_EQ(pick_chunk(sums, 0.625).share, 0.5);
  EXPECT_EQ(pick_chunk(sums, 1 - 0x1p-53).chunk, 3u);
  EXPECT_EQ(pick_chunk(sums, 1).chunk, 3u);
}

}  // namespace
}  // namespace unshard::inference
