#pragma once
// GGUF's quantised blocks, as groups of 32 values that share one or two scales.
// Source: the GGUF specification and the reference decoder of its Python package, against which the tests compare.
#include <cstdint>

#include "inference/weights/weight_view.h"

namespace unshard::inference {

inline constexpr std::int64_t kGroupValues = 32;

/// 32 values along a row: value[i] = scale[i / 16] * (q[i] - zero) + shift[i / 16]. Most types have one scale and shift for both halves.
struct Group {
  float scale[2] = {0, 0};
  float shift[2] = {0, 0};
  std::int32_t zero = 0;
  std::uint8_t q[kGroupValues] = {};
};

bool is_quantised(FileType type);
/// Groups [0, groups) of the row that begins at `row`. \param type  a quantised one; the row holds groups * 32 values
void unpack_groups(FileType type, const void* row, std::int64_t groups, Group* out);

}  // namespace unshard::inference
