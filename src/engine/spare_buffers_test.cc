#include "spare_buffers.h"

#include <gtest/gtest.h>

#include "flat.h"

namespace unshard {
namespace {

constexpr auto kFloat = c10::ScalarType::Float;

TEST(SpareBuffers, HandOutWhatWasGivenBackWhereSizeAndTypeAreEqual) {
  SpareBuffers spare(1 << 20);
  auto first = spare.take(1000, kFloat, c10::kCPU);
  const void* memory = first.data_ptr();
  spare.give_back(std::move(first));
  EXPECT_EQ(spare.bytes(), 4000);
  EXPECT_NE(spare.take(1001, kFloat, c10::kCPU).data_ptr(), memory);
  EXPECT_NE(spare.take(1000, c10::ScalarType::BFloat16, c10::kCPU).data_ptr(), memory);
  EXPECT_EQ(spare.take(1000, kFloat, c10::kCPU).data_ptr(), memory);
  EXPECT_EQ(spare.bytes(), 0);
}

TEST(SpareBuffers, KeepNothingThatASliceStillReads) {
  SpareBuffers spare(1 << 20);
  auto tensor = spare.take(1000, kFloat, c10::kCPU);
  const auto slice = flat::slice(tensor, 10, 5);
  spare.give_back(std::move(tensor));
  EXPECT_EQ(spare.bytes(), 0);
  spare.give_back(at::Tensor());
  EXPECT_EQ(spare.bytes(), 0);
}

TEST(SpareBuffers, KeepNoMoreThanTheyMay) {
  SpareBuffers spare(10'000);
  std::vector<at::Tensor> taken;
  for (int i = 0; i < 4; ++i) taken.push_back(spare.take(1000, kFloat, c10::kCPU));
  for (auto& tensor : taken) spare.give_back(std::move(tensor));
  EXPECT_EQ(spare.bytes(), 8000);
}

}  // namespace
}  // namespace unshard
