// Facts about weights in files: GGUF's blocks decode as its reference decoder has them; 16-bit floats convert exactly.
#include "inference/weights/gguf_blocks.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "inference/weights/half.h"

namespace unshard::inference {
namespace {

constexpr std::int64_t kRow = 512;

struct Recorded {
  FileType type;
  double weighted_sum;      ///< of value[i] * (i + 1)
  std::vector<float> some;  ///< every 32nd value, then the last
};
const Recorded kRecorded[] = {
#include "inference/weights/gguf_blocks_recorded.inc"
};

/// Bytes of a block that are fp16 numbers.
std::vector<int> scale_places(FileType type) {
  switch (type) {
    case FileType::q4_0:
    case FileType::q5_0:
    case FileType::q8_0:
      return {0};
    case FileType::q2_k:
      return {80, 82};
    case FileType::q3_k:
      return {108};
    case FileType::q6_k:
      return {208};
    default:
      return {0, 2};
  }
}

/// The row that record_gguf_blocks.py decoded.
std::vector<std::uint8_t> recorded_row(FileType type) {
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(kRow / block_values(type) * block_bytes(type)));
  std::uint32_t state = 12345;
  for (auto& byte : bytes) {
    state = state * 1664525 + 1013904223;
    byte = static_cast<std::uint8_t>(state >> 24);
  }
  for (std::int64_t b = 0; b < kRow / block_values(type); ++b) {
    int n = 0;
    for (const int place : scale_places(type)) {
      const double scale = (0.01 + 0.003 * static_cast<double>(b)) * ((b + n++) % 2 == 0 ? 1 : -1);
      const std::uint16_t bits = f16_of_float(static_cast<float>(scale));
      std::memcpy(bytes.data() + b * block_bytes(type) + place, &bits, sizeof bits);
    }
  }
  return bytes;
}

TEST(GgufBlocks, DecodeAsTheReferenceDecoder) {
  EXPECT_EQ(std::size(kRecorded), 10U);
  for (const Recorded& recorded : kRecorded) {
    SCOPED_TRACE(file_type_name(recorded.type));
    const auto bytes = recorded_row(recorded.type);
    const WeightView view = {recorded.type, bytes.data(), 1, kRow, "w"};
    ASSERT_EQ(view.row_bytes(), static_cast<std::int64_t>(bytes.size()));
    std::vector<float> row(kRow);
    expand_row(view, 0, row.data());
    double weighted = 0, size = 0;
    for (std::int64_t i = 0; i < kRow; ++i) {
      weighted += static_cast<double>(row[i]) * static_cast<double>(i + 1);
      size += std::abs(row[i]) * static_cast<double>(i + 1);
    }
    for (std::size_t i = 0; i < 16; ++i) EXPECT_EQ(row[32 * i], recorded.some[i]) << "value " << 32 * i;
    EXPECT_EQ(row.back(), recorded.some.back());
    EXPECT_NEAR(weighted, recorded.weighted_sum, 1e-7 * size);
  }
}

TEST(GgufBlocks, GroupsAreTheRow) {
  for (const Recorded& recorded : kRecorded) {
    const auto bytes = recorded_row(recorded.type);
    std::vector<float> row(kRow);
    expand_row({recorded.type, bytes.data(), 1, kRow, "w"}, 0, row.data());
    std::vector<Group> groups(kRow / 32);
    unpack_groups(recorded.type, bytes.data(), kRow / 32, groups.data());
    for (std::int64_t i = 0; i < kRow; ++i) {
      const Group& group = groups[i / 32];
      const auto half = i % 32 / 16;
      ASSERT_EQ(row[i], group.scale[half] * static_cast<float>(group.q[i % 32] - group.zero) + group.shift[half]);
    }
  }
}

TEST(WeightView, RowsOf16BitFloats) {
  const std::uint16_t halves[] = {0x3c00, 0xc000, 0x0001, 0x7c00}, brains[] = {0x3f80, 0xc000, 0x0001, 0x7f80};
  float row[2];
  expand_row({FileType::f16, halves, 2, 2, "h"}, 0, row);
  EXPECT_EQ(row[0], 1.0F);
  EXPECT_EQ(row[1], -2.0F);
  expand_row({FileType::f16, halves, 2, 2, "h"}, 1, row);
  EXPECT_EQ(row[0], 0x1p-24F);
  EXPECT_TRUE(std::isinf(row[1]));
  expand_row({FileType::bf16, brains, 2, 2, "b"}, 1, row);
  EXPECT_EQ(row[0], 0x1p-133F);
  EXPECT_TRUE(std::isinf(row[1]));
}

TEST(Half, EveryFp16ComesBackAndTiesGoToEven) {
  for (std::uint32_t h = 0; h < 0x10000; ++h) {
    const float x = float_of_f16(static_cast<std::uint16_t>(h));
    if (std::isnan(x)) {
      EXPECT_TRUE(std::isnan(float_of_f16(f16_of_float(x))));
    } else {
      ASSERT_EQ(f16_of_float(x), h);
    }
  }
  EXPECT_EQ(f16_of_float(1.0F + 0x1p-11F), 0x3c00);
  EXPECT_EQ(f16_of_float(1.0F + 3 * 0x1p-11F), 0x3c02);
  EXPECT_EQ(f16_of_float(65519.9F), 0x7bff);
  EXPECT_EQ(f16_of_float(65520.0F), 0x7c00);
  EXPECT_EQ(f16_of_float(0x1p-25F), 0);
  EXPECT_EQ(bf16_of_float(1.0F + 0x1p-8F), 0x3f80);
  EXPECT_EQ(bf16_of_float(1.0F + 3 * 0x1p-8F), 0x3f82);
}

}  // namespace
}  // namespace unshard::inference
