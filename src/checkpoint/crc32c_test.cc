#include "checkpoint/crc32c.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace unshard::checkpoint {
namespace {

TEST(Crc32c, HasTheValuesOfRfc3720) {
  const std::vector<unsigned char> zeros(32, 0), ones(32, 0xFF);
  std::vector<unsigned char> rising(32);
  for (unsigned char i = 0; i < 32; ++i) rising[i] = i;
  const std::string digits = "123456789";
  for (const auto sum : {crc32c, crc32c_portable}) {
    EXPECT_EQ(sum(0, zeros.data(), zeros.size()), 0x8A9136AAu);
    EXPECT_EQ(sum(0, ones.data(), ones.size()), 0x62A8AB43u);
    EXPECT_EQ(sum(0, rising.data(), rising.size()), 0x46DD794Eu);
    EXPECT_EQ(sum(0, digits.data(), digits.size()), 0xE3069283u);
    EXPECT_EQ(sum(0, nullptr, 0), 0u);
  }
}

TEST(Crc32c, IsTheSameHoweverTheBytesAreCut) {
  std::mt19937 random(1);
  std::vector<unsigned char> bytes(20'000);  // more than three stripes of three
  for (auto& byte : bytes) byte = static_cast<unsigned char>(random());
  const auto whole = crc32c_portable(0, bytes.data(), bytes.size());
  for (int round = 0; round < 200; ++round) {
    const std::size_t cut = random() % bytes.size();
    EXPECT_EQ(crc32c(crc32c(0, bytes.data(), cut), bytes.data() + cut, bytes.size() - cut), whole) << cut;
    EXPECT_EQ(crc32c_portable(crc32c(0, bytes.data(), cut), bytes.data() + cut, bytes.size() - cut), whole) << cut;
  }
}

}  // namespace
}  // namespace unshard::checkpoint
