#pragma once
// Names of element types in the JSON and in tables.
#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <string_view>

namespace unshard {
/// "fp32", "float32", "torch.float32", "float", "bf16", "bfloat16", "fp16", "float16", "half" ... -> ScalarType; nullopt if unknown.
std::optional<c10::ScalarType> parse_dtype(std::string_view name);
/// "fp32", "bf16", "fp16", else torch's own name.
std::string dtype_name(c10::ScalarType dtype);
}  // namespace unshard
