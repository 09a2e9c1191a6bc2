#include "unshard/core/dtype.h"

#include <gtest/gtest.h>

namespace unshard {
namespace {

TEST(Dtype, EverySynonymMeansTheSameType) {
  for (const char* name : {"fp32", "float32", "torch.float32", "float", "FP32", "torch.float"})
    EXPECT_EQ(parse_dtype(name), c10::kFloat) << name;
  for (const char* name : {"bf16", "bfloat16", "torch.bfloat16", "BF16"}) EXPECT_EQ(parse_dtype(name), c10::kBFloat16) << name;
  for (const char* name : {"fp16", "float16", "half", "torch.half", "torch.float16"}) EXPECT_EQ(parse_dtype(name), c10::kHalf) << name;
  EXPECT_EQ(parse_dtype("double"), c10::kDouble);
  EXPECT_EQ(parse_dtype("torch.int64"), c10::kLong);
}

TEST(Dtype, UnknownNamesAreNull) {
  for (const char* name : {"", "fp8", "torch.", "float33", "torch.torch.float"}) EXPECT_EQ(parse_dtype(name), std::nullopt) << name;
}

TEST(Dtype, NamesReadBackAsTheSameType) {
  EXPECT_EQ(dtype_name(c10::kFloat), "fp32");
  EXPECT_EQ(dtype_name(c10::kBFloat16), "bf16");
  EXPECT_EQ(dtype_name(c10::kHalf), "fp16");
  for (const auto dtype : {c10::kDouble, c10::kChar, c10::kByte, c10::kShort, c10::kInt, c10::kLong, c10::kBool})
    EXPECT_EQ(parse_dtype(dtype_name(dtype)), dtype) << dtype_name(dtype);
}

}  // namespace
}  // namespace unshard
