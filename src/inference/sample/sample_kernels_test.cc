// Facts about the passes: right against plain loops, and the same bits from every instruction set.
#include "inference/sample/sample_kernels.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "core/cpu_isa.h"

namespace unshard::inference {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const std::int64_t kSizes[] = {1, 7, 15, 16, 17, 31, 33, 1000, 1023, 1024, 1025, 1040, 5000};

std::vector<const SampleKernels*> tables() {
  std::vector<const SampleKernels*> result{&sample_kernels_portable()};
  if (kernels::selected_isa() >= kernels::Isa::avx2) result.push_back(&sample_kernels_avx2());
  if (kernels::selected_isa() >= kernels::Isa::avx512) result.push_back(&sample_kernels_avx512());
  return result;
}

/// Normal, with some -inf and some equal ones.
std::vector<float> values_of(std::int64_t n, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 5);
  std::vector<float> values(static_cast<std::size_t>(n));
  for (auto& value : values) value = random() % 10 == 0 ? -kInfinity : random() % 10 == 0 ? 1.0F : normal(random);
  return values;
}
std::vector<float> maxima_of(const SampleKernels& kernels, std::vector<float> values, const std::uint32_t* allowed = nullptr) {
  std::vector<float> maxima(static_cast<std::size_t>(sample_chunks(static_cast<std::int64_t>(values.size())) * kSampleLanes));
  EXPECT_FALSE(kernels.scan(values.data(), static_cast<std::int64_t>(values.size()), allowed, maxima.data()));
  return maxima;
}

TEST(SampleScan, GivesTheMaximumOfEachLaneOfEachChunk) {
  for (const auto n : kSizes) {
    const auto values = values_of(n, 1);
    std::vector<float> wanted(static_cast<std::size_t>(sample_chunks(n) * kSampleLanes), -kInfinity);
    for (std::int64_t i = 0; i < n; ++i) {
      float& lane = wanted[static_cast<std::size_t>(i / kSampleChunk * kSampleLanes + i % kSampleLanes)];
      lane = std::max(lane, values[static_cast<std::size_t>(i)]);
    }
    for (const auto* kernels : tables()) EXPECT_EQ(maxima_of(*kernels, values), wanted) << n;
  }
}

TEST(SampleScan, TakesOutWhatIsNotAllowedAndNothingElse) {
  std::mt19937 random(2);
  for (const auto n : kSizes) {
    std::vector<std::uint32_t> allowed(static_cast<std::size_t>((n + 31) / 32));
    for (auto& word : allowed) word = static_cast<std::uint32_t>(random());
    for (const auto* kernels : tables()) {
      auto values = values_of(n, 3), wanted = values;
      for (std::size_t i = 0; i < values.size(); ++i) {
        if ((allowed[i / 32] >> (i % 32) & 1) == 0) wanted[i] = -kInfinity;
      }
      std::vector<float> maxima(static_cast<std::size_t>(sample_chunks(n) * kSampleLanes));
      EXPECT_FALSE(kernels->scan(values.data(), n, allowed.data(), maxima.data()));
      EXPECT_EQ(values, wanted) << n;
      EXPECT_EQ(maxima, maxima_of(*kernels, wanted)) << n;
    }
  }
}

TEST(SampleScan, FindsANaNAnywhereEvenWhereItIsNotAllowed) {
  for (const auto n : kSizes) {
    const std::vector<std::uint32_t> none(static_cast<std::size_t>((n + 31) / 32));
    std::vector<float> maxima(static_cast<std::size_t>(sample_chunks(n) * kSampleLanes));
    for (const auto* kernels : tables()) {
      for (std::int64_t at = 0; at<n; at += n> 100 ? 61 : 1) {
        auto values = values_of(n, 4), masked = values;
        values[static_cast<std::size_t>(at)] = masked[static_cast<std::size_t>(at)] = std::nanf("");
        EXPECT_TRUE(kernels->scan(values.data(), n, nullptr, maxima.data())) << at << " of " << n;
        EXPECT_TRUE(kernels->scan(masked.data(), n, none.data(), maxima.data())) << at << " of " << n;
      }
    }
  }
}

TEST(SampleExps, AreRightToTheRemainderAndTwoRoundingsAndZeroForWhatIsOut) {
  std::vector<float> x, got;
  for (float z = 0; z > -86.9F; z -= 0.0037F) x.push_back(z + 3);
  for (const float z : {-87.5F, -1e5F, -3e38F, -kInfinity}) x.push_back(z);
  got.resize(x.size());
  const auto n = static_cast<std::int64_t>(x.size());
  for (const auto* kernels : tables()) {
    kernels->exps(x.data(), n, 3, 1, got.data());
    for (std::size_t i = 0; i + 4 < x.size(); ++i) EXPECT_NEAR(got[i] / std::exp(static_cast<double>(x[i] - 3.0F)), 1, 2.4e-7) << x[i] - 3;
    for (std::size_t i = x.size() - 4; i < x.size(); ++i) EXPECT_EQ(got[i], 0);
    EXPECT_EQ(got[0], 1);
  }
}

TEST(SampleKernels, GiveTheSameBitsInEveryInstructionSet) {
  for (const auto n : kSizes) {
    const auto values = values_of(n, 5);
    std::vector<std::vector<std::uint32_t>> results;
    for (const auto* kernels : tables()) {
      std::vector<float> weights(values.size());
      std::vector<double> sums(static_cast<std::size_t>(sample_chunks(n)));
      kernels->exps(values.data(), n, 21, 0.3F, weights.data());
      kernels->sum_exp(values.data(), n, 21, 0.3F, sums.data());
      sums.push_back(kernels->above(values.data(), weights.data(), n, -2).mass);
      auto& bits = results.emplace_back();
      for (const float weight : weights) bits.push_back(std::bit_cast<std::uint32_t>(weight));
      for (const double sum : sums) {
        bits.push_back(static_cast<std::uint32_t>(std::bit_cast<std::uint64_t>(sum)));
        bits.push_back(static_cast<std::uint32_t>(std::bit_cast<std::uint64_t>(sum) >> 32));
      }
    }
    for (const auto& result : results) EXPECT_EQ(result, results.front()) << n;
  }
}

TEST(SampleSums, EqualTheSumOfTheExps) {
  for (const auto n : kSizes) {
    const auto values = values_of(n, 6);
    for (const auto* kernels : tables()) {
      std::vector<double> sums(static_cast<std::size_t>(sample_chunks(n))), wanted(sums.size());
      for (std::size_t i = 0; i < values.size(); ++i) wanted[i / kSampleChunk] += std::exp((static_cast<double>(values[i]) - 21) * 0.5);
      kernels->sum_exp(values.data(), n, 21, 0.5F, sums.data());
      for (std::size_t c = 0; c < sums.size(); ++c) EXPECT_NEAR(sums[c], wanted[c], 3e-6 * wanted[c]) << n;
    }
  }
}

TEST(SampleGather, FindsAllInTheRangeInOrder) {
  for (const auto n : kSizes) {
    const auto values = values_of(n, 7);
    for (const auto* kernels : tables()) {
      const auto maxima = maxima_of(*kernels, values);
      for (const auto& [low, high] : {std::pair{1.0F, kInfinity}, {-4.0F, 1.0F}, {-3e38F, kInfinity}, {100.0F, kInfinity}}) {
        std::vector<std::int32_t> ids(values.size() + 16), wanted;
        std::vector<float> found(values.size() + 16);
        for (std::size_t i = 0; i < values.size(); ++i) {
          if (values[i] >= low && values[i] < high) wanted.push_back(static_cast<std::int32_t>(i));
        }
        for (const float* skip : {maxima.data(), static_cast<const float*>(nullptr)}) {
          const auto count = kernels->gather(values.data(), n, skip, low, high, ids.data(), found.data());
          EXPECT_EQ(std::vector(ids.begin(), ids.begin() + count), wanted) << n;
          for (std::int64_t i = 0; i < count; ++i)
            EXPECT_EQ(found[static_cast<std::size_t>(i)], values[static_cast<std::size_t>(ids[static_cast<std::size_t>(i)])]);
        }
      }
    }
  }
}

TEST(SampleCompact, LeavesTheLargeOnesInOrderAndAboveCountsThem) {
  for (const auto n : kSizes) {
    const auto values = values_of(n, 8);
    for (const auto* kernels : tables()) {
      auto left = values;
      std::vector<std::int32_t> ids(values.size());
      std::vector<float> weights(values.size());
      for (std::size_t i = 0; i < ids.size(); ++i) {
        ids[i] = static_cast<std::int32_t>(3 * i);
        weights[i] = static_cast<float>(i % 100);  // small integers: sums are exact
      }
      double mass = 0;
      std::vector<std::int32_t> wanted;
      for (std::size_t i = 0; i < ids.size(); ++i) {
        if (values[i] < 1) continue;
        wanted.push_back(ids[i]);
        mass += weights[i];
      }
      const Above above = kernels->above(values.data(), weights.data(), n, 1);
      EXPECT_EQ(above.count, static_cast<std::int64_t>(wanted.size()));
      EXPECT_EQ(above.mass, mass);
      for (auto* array : {&left, &weights}) array->resize(values.size() + 16);
      ids.resize(values.size() + 16);
      const auto count = kernels->compact(ids.data(), left.data(), weights.data(), n, 1);
      ASSERT_EQ(count, above.count);
      EXPECT_EQ(std::vector(ids.begin(), ids.begin() + count), wanted) << n;
      for (std::int64_t i = 0; i < count; ++i) {
        const auto at = static_cast<std::size_t>(i), from = static_cast<std::size_t>(ids[at] / 3);
        EXPECT_EQ(left[at], values[from]);
        EXPECT_EQ(weights[at], static_cast<float>(from % 100));
      }
    }
  }
}

}  // namespace
}  // namespace unshard::inference
