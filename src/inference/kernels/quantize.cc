#include "inference/kernels/quantize.h"

#include <algorithm>

#include "inference/weights/gguf_blocks.h"
#include "inference/weights/half.h"

namespace unshard::inference {
namespace {

/// f(group, its values) over row `r`, expanded.
void round_row(const WeightView& view, std::int64_t r, std::vector<float>& scratch, StoredGroup* out,
               void (*round)(const float*, StoredGroup&)) {
  scratch.resize(static_cast<std::size_t>(view.cols));
  expand_row(view, r, scratch.data());
  for (std::int64_t g = 0; g < view.cols / kGroup; ++g) round(scratch.data() + g * kGroup, out[g]);
}

/// convert(group of the file, group to store) over row `r`.
template <class Convert>
void take_over_row(const WeightView& view, std::int64_t r, StoredGroup* out, Convert convert) {
  const std::int64_t per_block = block_values(view.type) / kGroup;
  const auto* block = static_cast<const std::uint8_t*>(view.row(r));
  Group groups[8];
  for (std::int64_t g = 0; g < view.cols / kGroup; g += per_block, block += block_bytes(view.type)) {
    unpack_groups(view.type, block, per_block, groups);
    for (std::int64_t i = 0; i < per_block; ++i) convert(groups[i], out[g + i]);
  }
}

}  // namespace

void quantize_row_q8(const MatrixKernels& kernels, const WeightView& view, std::int64_t r, std::vector<float>& scratch, StoredGroup* out) {
  // Types whose groups have one scale, no shift, and whole numbers that fit.
  const bool fits = view.type == FileType::q8_0 || view.type == FileType::q5_0 || view.type == FileType::q4_0;
  if (!fits) return round_row(view, r, scratch, out, kernels.round_q8);
  take_over_row(view, r, out, [](const Group& from, StoredGroup& to) {
    to.scale = f16_of_float(from.scale[0]);
    to.shift = 0;
    for (int i = 0; i < kGroup; ++i) to.q[i] = static_cast<std::uint8_t>(from.q[i] + 128 - from.zero);
  });
}

void quantize_row_q4(const MatrixKernels& kernels, const WeightView& view, std::int64_t r, std::vector<float>& scratch, StoredGroup* out) {
  const bool fits = view.type == FileType::q4_0 || view.type == FileType::q4_1 || view.type == FileType::q4_k;
  if (!fits) return round_row(view, r, scratch, out, kernels.round_q4);
  take_over_row(view, r, out, [](const Group& from, StoredGroup& to) {
    to.scale = f16_of_float(from.scale[0]);
    to.shift = f16_of_float(from.shift[0] - from.scale[0] * static_cast<float>(from.zero));
    std::copy_n(from.q, kGroup, to.q);
  });
}

}  // namespace unshard::inference
