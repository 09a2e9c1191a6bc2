// Facts about the flat passes: exact sums, IEEE conversions, and the same bits from every instruction set, split and alignment.
#include "unshard/core/flat_math.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/cpu_isa.h"
#include "core/flat_math_kernels.h"

namespace unshard::kernels {
namespace {

using c10::ScalarType;

std::size_t width(ScalarType dtype) { return dtype == ScalarType::Float ? 4 : 2; }

float get(const Array& a, std::int64_t i) {
  if (a.dtype == ScalarType::Float) return static_cast<const float*>(a.data)[i];
  if (a.dtype == ScalarType::BFloat16) return static_cast<const c10::BFloat16*>(a.data)[i];
  return static_cast<const c10::Half*>(a.data)[i];
}
void put(const Array& a, std::int64_t i, float x) {
  if (a.dtype == ScalarType::Float) static_cast<float*>(a.data)[i] = x;
  if (a.dtype == ScalarType::BFloat16) static_cast<c10::BFloat16*>(a.data)[i] = x;
  if (a.dtype == ScalarType::Half) static_cast<c10::Half*>(a.data)[i] = x;
}

/// n elements at an odd element offset, between guard bytes that the destructor checks.
class Memory {
 public:
  Memory(std::int64_t n, ScalarType dtype, int offset) : bytes_(n * width(dtype)), begin_(16 + offset * width(dtype)) {
    raw_.assign(begin_ + bytes_ + 64, 0x5a);
    array_ = {raw_.data() + begin_, dtype};
  }
  ~Memory() {
    for (std::size_t i = 0; i < raw_.size(); ++i) {
      if (i < begin_ || i >= begin_ + bytes_) {
        EXPECT_EQ(raw_[i], 0x5a) << "written outside the array, byte " << i;
      }
    }
  }
  Array array() const { return array_; }
  std::vector<unsigned char> bits() const { return {raw_.begin() + begin_, raw_.begin() + begin_ + bytes_}; }
  void fill(std::mt19937& random, float size = 1) {
    std::normal_distribution<float> normal(0, size);
    for (std::size_t i = 0; i < bytes_ / width(array_.dtype); ++i) put(array_, i, normal(random));
  }

 private:
  std::size_t bytes_, begin_;
  std::vector<unsigned char> raw_;
  Array array_;
};

std::vector<const FlatKernels*> tables() {
  std::vector<const FlatKernels*> result{&flat_kernels_portable()};
  if (selected_isa() >= Isa::avx2) result.push_back(&flat_kernels_avx2());
  if (selected_isa() >= Isa::avx512) result.push_back(&flat_kernels_avx512());
  return result;
}
Flat flat(const Array& a) {
  return {a.data, a.dtype == ScalarType::Float ? Element::f32 : a.dtype == ScalarType::BFloat16 ? Element::bf16 : Element::f16};
}

const ScalarType kTypes[] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};
const std::int64_t kSizes[] = {0, 1, 7, 15, 16, 17, 31, 32, 33, 100, 1000, 4095, 4096, 4097, 70001};

TEST(Copy, ConvertsAsTorchDoesForEveryPairOfTypesAndSize) {
  std::mt19937 random(1);
  for (const auto from : kTypes) {
    for (const auto to : kTypes) {
      for (const auto n : kSizes) {
        for (const double scale : {1.0, 0.37}) {
          Memory source(n, from, n % 5), target(n, to, n % 3);
          source.fill(random);
          copy(n, target.array(), source.array(), scale);
          Memory wanted(n, to, 0);
          for (std::int64_t i = 0; i < n; ++i) put(wanted.array(), i, get(source.array(), i) * static_cast<float>(scale));
          ASSERT_EQ(target.bits(), wanted.bits()) << c10::toString(from) << " to " << c10::toString(to) << " n " << n;
        }
      }
    }
  }
}

TEST(Copy, EveryHalfIsWidenedAndNarrowedExactlyInEveryInstructionSet) {
  for (const auto dtype : {ScalarType::Half, ScalarType::BFloat16}) {
    std::vector<std::uint16_t> all(65536), back(65536);
    for (int i = 0; i < 65536; ++i) all[i] = static_cast<std::uint16_t>(i);
    const Array halves{all.data(), dtype};
    for (const auto* kernels : tables()) {
      std::vector<float> wide(65536);
      kernels->copy(0, 65536, flat({wide.data(), ScalarType::Float}), flat(halves), 1);
      for (int i = 0; i < 65536; ++i) {
        const float wanted = get(halves, i);
        ASSERT_TRUE(std::isnan(wanted) ? std::isnan(wide[i]) : std::bit_cast<int>(wanted) == std::bit_cast<int>(wide[i])) << i;
      }
      kernels->copy(0, 65536, flat({back.data(), dtype}), flat({wide.data(), ScalarType::Float}), 1);
      for (int i = 0; i < 65536; ++i) {
        if (std::isnan(wide[i]))
          ASSERT_TRUE(std::isnan(get({back.data(), dtype}, i))) << i;
        else
          ASSERT_EQ(back[i], all[i]);
      }
    }
  }
}

TEST(Copy, RoundsToNearestEvenIncludingSubnormalsOverflowAndNaN) {
  std::vector<float> values;
  std::mt19937 random(2);
  for (int i = 0; i < 300000; ++i) values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
  for (std::uint32_t h = 0; h < 0x7c00; ++h) {  // every halfway point of fp16, and its neighbours
    const float low = c10::Half(static_cast<std::uint16_t>(h), c10::Half::from_bits()), high = c10::Half(h + 1, c10::Half::from_bits());
    const float half = std::isinf(high) ? 65520.0F : low + (high - low) / 2;
    for (const float x : {half, std::nextafter(half, 0.0F), std::nextafter(half, 1e9F)}) values.insert(values.end(), {x, -x});
  }
  const auto n = static_cast<std::int64_t>(values.size());
  for (const auto dtype : {ScalarType::Half, ScalarType::BFloat16}) {
    Memory wanted(n, dtype, 0);
    for (std::int64_t i = 0; i < n; ++i) put(wanted.array(), i, values[i]);
    std::vector<std::vector<unsigned char>> results;
    for (const auto* kernels : tables()) {
      Memory got(n, dtype, 1);
      kernels->copy(0, n, flat(got.array()), flat({values.data(), ScalarType::Float}), 1);
      for (std::int64_t i = 0; i < n; ++i) {
        const float a = get(got.array(), i), b = get(wanted.array(), i);
        ASSERT_TRUE(std::isnan(b) ? std::isnan(a) : std::bit_cast<int>(a) == std::bit_cast<int>(b)) << values[i] << " gave " << a;
      }
      results.push_back(got.bits());
    }
    for (const auto& result : results) EXPECT_EQ(result, results.front());
  }
}

TEST(Accumulate, AddsInRankOrderInFp32ForEveryCombinationOfTypes) {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    const std::int64_t n = kSizes[random() % std::size(kSizes)];
    const int count = static_cast<int>(random() % 5);
    const bool first = random() % 2, mixed = random() % 2;
    const auto input_type = kTypes[random() % 3];
    Memory sum(n, kTypes[random() % 3], random() % 9);
    sum.fill(random);
    std::vector<Memory> inputs;
    inputs.reserve(count);
    std::vector<Array> arrays;
    for (int r = 0; r < count; ++r) {
      inputs.emplace_back(n, mixed ? kTypes[random() % 3] : input_type, random() % 9);
      inputs.back().fill(random);
      arrays.push_back(inputs.back().array());
    }
    Memory wanted(n, sum.array().dtype, 0);
    for (std::int64_t i = 0; i < n; ++i) {
      float x = first ? 0.0F : get(sum.array(), i);
      for (const auto& a : arrays) x += get(a, i);
      put(wanted.array(), i, x);
    }
    accumulate(n, sum.array(), arrays.data(), count, first);
    ASSERT_EQ(sum.bits(), wanted.bits()) << "n " << n << " count " << count << " first " << first << " mixed " << mixed;
  }
}

TEST(Accumulate, AnInputMayBeTheAccumulatorItself) {
  for (const bool mixed : {false, true}) {
    std::vector<float> a(5000, 1), b(5000, 2);
    std::vector<c10::BFloat16> c(5000, 4.0F);
    const Array inputs[] = {{b.data(), ScalarType::Float}, {a.data(), ScalarType::Float}, {c.data(), ScalarType::BFloat16}};
    accumulate(5000, inputs[1], inputs, mixed ? 3 : 2, true);
    EXPECT_EQ(a, std::vector<float>(5000, mixed ? 7.0F : 3.0F));
  }
}

TEST(FlatPasses, GiveTheSameBitsInEveryInstructionSetAndPieceSplit) {
  std::mt19937 random(4);
  for (int round = 0; round < 200; ++round) {
    const std::int64_t n = 1 + static_cast<std::int64_t>(random() % 9000), cut = static_cast<std::int64_t>(random() % n);
    const auto from = kTypes[random() % 3], to = kTypes[random() % 3];
    Memory a(n, from, random() % 9), b(n, from, random() % 9);
    a.fill(random);
    b.fill(random);
    const Flat inputs[] = {flat(a.array()), flat(b.array())};
    std::vector<std::vector<unsigned char>> results;
    for (const auto* kernels : tables()) {
      for (const auto split : {std::int64_t{0}, cut}) {
        Memory sum(n, to, random() % 9), scaled(n, to, random() % 9);
        kernels->accumulate(0, split, flat(sum.array()), inputs, 2, true, true);
        kernels->accumulate(split, n, flat(sum.array()), inputs, 2, split % 2 == 0, true);
        kernels->copy(0, split, flat(scaled.array()), inputs[0], 0.3F);
        kernels->copy(split, n, flat(scaled.array()), inputs[0], 0.3F);
        results.push_back(sum.bits());
        const auto more = scaled.bits();
        results.back().insert(results.back().end(), more.begin(), more.end());
      }
    }
    for (const auto& result : results) ASSERT_EQ(result, results.front());
  }
}

TEST(SumOfSquares, IsExactForSmallIntegersAndEqualInEveryInstructionSet) {
  std::mt19937 random(5);
  for (const auto dtype : kTypes) {
    for (const auto n : kSizes) {
      Memory values(n, dtype, n % 7);
      double wanted = 0;
      for (std::int64_t i = 0; i < n; ++i) {
        const auto x = static_cast<float>(static_cast<int>(random() % 17) - 8);
        put(values.array(), i, x);
        wanted += static_cast<double>(x) * x;
      }
      const auto result = sum_of_squares(n, values.array());
      EXPECT_EQ(result.sum, wanted);
      EXPECT_TRUE(result.finite);
      values.fill(random);
      for (const auto* kernels : tables()) {
        const std::int64_t block = n < kBlock ? n : kBlock;
        EXPECT_EQ(kernels->block_squares(0, block, flat(values.array())),
                  flat_kernels_portable().block_squares(0, block, flat(values.array())));
      }
    }
  }
}

TEST(SumOfSquares, LargeFiniteValuesDoNotOverflowAndOneBadElementIsFoundAnywhere) {
  for (const std::int64_t n : {1, 16, 33, 5000, 70001}) {
    std::vector<float> values(static_cast<std::size_t>(n), 3e38F);
    const auto large = sum_of_squares(n, {values.data(), ScalarType::Float});
    EXPECT_TRUE(large.finite);
    EXPECT_NEAR(large.sum / (static_cast<double>(n) * 3e38 * 3e38), 1, 1e-6);
    for (const std::int64_t where : {std::int64_t{0}, n / 2, n - 1}) {
      for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(), std::nanf("")}) {
        const float kept = values[static_cast<std::size_t>(where)];
        values[static_cast<std::size_t>(where)] = bad;
        EXPECT_FALSE(sum_of_squares(n, {values.data(), ScalarType::Float}).finite) << bad << " at " << where << " of " << n;
        values[static_cast<std::size_t>(where)] = kept;
      }
    }
  }
}

TEST(FlatPasses, TheNumberOfThreadsChangesNothing) {
  constexpr std::int64_t n = 1'000'003;
  std::vector<float> values(n), one(n), three(n);
  std::mt19937 random(6);
  std::normal_distribution<float> normal;
  for (auto& x : values) x = normal(random);
  const Array inputs[] = {{values.data(), ScalarType::Float}, {values.data() + 0, ScalarType::Float}};
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const auto squares = sum_of_squares(n, inputs[0]);
  accumulate(n, {one.data(), ScalarType::Float}, inputs, 2, true);
  at::set_num_threads(3);
  EXPECT_EQ(sum_of_squares(n, inputs[0]).sum, squares.sum);
  accumulate(n, {three.data(), ScalarType::Float}, inputs, 2, true);
  at::set_num_threads(before);
  EXPECT_EQ(one, three);
}

TEST(FlatPasses, RefuseAnUnsupportedTypeByName) {
  double x = 0;
  try {
    sum_of_squares(1, {&x, ScalarType::Double});
    FAIL() << "accepted";
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("Double"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace unshard::kernels
