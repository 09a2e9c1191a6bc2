#include "unshard/core/dtype.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <utility>

namespace unshard {
namespace {

using Name = std::pair<std::string_view, c10::ScalarType>;
constexpr std::array kNames = {
    Name{"fp32", c10::kFloat},        Name{"float32", c10::kFloat},  Name{"float", c10::kFloat},   Name{"bf16", c10::kBFloat16},
    Name{"bfloat16", c10::kBFloat16}, Name{"fp16", c10::kHalf},      Name{"float16", c10::kHalf},  Name{"half", c10::kHalf},
    Name{"fp64", c10::kDouble},       Name{"float64", c10::kDouble}, Name{"double", c10::kDouble}, Name{"int8", c10::kChar},
    Name{"uint8", c10::kByte},        Name{"int16", c10::kShort},    Name{"short", c10::kShort},   Name{"int32", c10::kInt},
    Name{"int", c10::kInt},           Name{"int64", c10::kLong},     Name{"long", c10::kLong},     Name{"bool", c10::kBool},
};

}  // namespace

std::optional<c10::ScalarType> parse_dtype(std::string_view name) {
  std::string lower(name);
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  constexpr std::string_view kPrefix = "torch.";
  std::string_view text = lower;
  if (text.starts_with(kPrefix)) text.remove_prefix(kPrefix.size());
  const auto found = std::find_if(kNames.begin(), kNames.end(), [&](const Name& entry) { return entry.first == text; });
  if (found == kNames.end()) return std::nullopt;
  return found->second;
}

std::string dtype_name(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kFloat:
      return "fp32";
    case c10::kBFloat16:
      return "bf16";
    case c10::kHalf:
      return "fp16";
    default:
      break;
  }
  const auto found = std::find_if(kNames.begin(), kNames.end(), [&](const Name& entry) {
    return entry.second == dtype && entry.first != "fp64";  // torch says float64
  });
  return found == kNames.end() ? c10::toString(dtype) : std::string(found->first);
}

}  // namespace unshard
