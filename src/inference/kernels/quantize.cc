#include "inference/kernels/quantize.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "inference/weights/gguf_blocks.h"
#include "inference/weights/half.h"

namespace unshard::inference {
namespace {

constexpr float kMagic = 12582912.0F;  // 1.5 * 2^23: adding and taking it away rounds to whole numbers, and vectorises

float round_whole(float x) { return (x + kMagic) - kMagic; }
/// NaN where a weight isn't finite, so that it shows in the results as it would in floats; 0 otherwise.
float not_finite(const float* x, std::int64_t n) {
  float check = 0;
  for (std::int64_t i = 0; i < n; ++i) check += x[i] - x[i];
  return check;
}
float largest_size(const float* x, std::int64_t n) {
  float result = 0;
  for (std::int64_t i = 0; i < n; ++i) result = std::max(result, std::abs(x[i]));
  return result;
}
float half_precision(float x) { return float_of_f16(f16_of_float(std::clamp(x, -65504.0F, 65504.0F))); }

/// 128 + round(x * inverse), within 1..255.
void store_offset(const float* x, std::int64_t n, float inverse, std::uint8_t* q) {
  for (std::int64_t i = 0; i < n; ++i)
    q[i] = static_cast<std::uint8_t>(128 + static_cast<int>(std::clamp(round_whole(x[i] * inverse), -127.0F, 127.0F)));
}

/// 0 for a scale that says that all values are 0, or that isn't a number.
float inverse_of(float scale) { return scale > 1e-30F ? 1 / scale : 0; }

void round_q8(const float* x, StoredGroup& out) {
  const float bad = not_finite(x, kGroup), scale = half_precision(largest_size(x, kGroup) / 127);
  out = {f16_of_float(bad != 0 ? bad : scale), 0, {}};
  if (bad != 0) return;
  store_offset(x, kGroup, inverse_of(scale), out.q);
}

struct Affine {
  float scale = 0, shift = 0, error = std::numeric_limits<float>::infinity();
};

void round_q4_with(const float* x, const Affine& map, float* q) {
  const float inverse = inverse_of(map.scale);
  for (int i = 0; i < kGroup; ++i) q[i] = round_whole(std::clamp((x[i] - map.shift) * inverse, 0.0F, 15.0F));
}

/// The scale and shift that fit x best (least squares), once its values are rounded as `start` says.
Affine fit(const float* x, const Affine& start) {
  float q[kGroup], sum_q = 0, sum_qq = 0, sum_x = 0, sum_qx = 0, sum_xx = 0;
  round_q4_with(x, start, q);
  for (int i = 0; i < kGroup; ++i) {
    sum_q += q[i];
    sum_qq += q[i] * q[i];
    sum_x += x[i];
    sum_qx += q[i] * x[i];
    sum_xx += x[i] * x[i];
  }
  const float spread = kGroup * sum_qq - sum_q * sum_q;
  if (!(spread > 0)) return {};
  Affine result;
  result.scale = (kGroup * sum_qx - sum_q * sum_x) / spread;
  result.shift = (sum_x - result.scale * sum_q) / kGroup;
  result.error = sum_xx - result.scale * sum_qx - result.shift * sum_x;
  return result;
}

/// Rounds to the ends of ever smaller ranges, fits scale and shift to each, and keeps the best: about a quarter less squared error than
/// smallest and largest value as the ends.
void round_q4(const float* x, StoredGroup& out) {
  const float bad = not_finite(x, kGroup);
  if (bad != 0) {
    out = {f16_of_float(bad), 0, {}};
    return;
  }
  const auto [low, high] = std::minmax_element(x, x + kGroup);
  const float middle = (*low + *high) / 2, half_range = (*high - *low) / 2;
  Affine best = {0, *low};
  for (int step = 0; step < 8; ++step) {
    const float range = half_range * (1 - 0.05F * static_cast<float>(step));
    const Affine candidate = fit(x, {range * 2 / 15, middle - range});
    if (candidate.error < best.error) best = candidate;
  }
  best.scale = half_precision(best.scale);
  best.shift = half_precision(best.shift);
  float q[kGroup];
  round_q4_with(x, best, q);
  out.scale = f16_of_float(best.scale);
  out.shift = f16_of_float(best.shift);
  for (int i = 0; i < kGroup; ++i) out.q[i] = static_cast<std::uint8_t>(q[i]);
}

/// f(group, its values) over row `r`, expanded.
template <class Round>
void round_row(const WeightView& view, std::int64_t r, std::vector<float>& scratch, StoredGroup* out, Round round) {
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

void quantize_row_q8(const WeightView& view, std::int64_t r, std::vector<float>& scratch, StoredGroup* out) {
  // Types whose groups have one scale, no shift, and whole numbers that fit.
  const bool fits = view.type == FileType::q8_0 || view.type == FileType::q5_0 || view.type == FileType::q4_0;
  if (!fits) return round_row(view, r, scratch, out, round_q8);
  take_over_row(view, r, out, [](const Group& from, StoredGroup& to) {
    to.scale = f16_of_float(from.scale[0]);
    to.shift = 0;
    for (int i = 0; i < kGroup; ++i) to.q[i] = static_cast<std::uint8_t>(from.q[i] + 128 - from.zero);
  });
}

void quantize_row_q4(const WeightView& view, std::int64_t r, std::vector<float>& scratch, StoredGroup* out) {
  const bool fits = view.type == FileType::q4_0 || view.type == FileType::q4_1 || view.type == FileType::q4_k;
  if (!fits) return round_row(view, r, scratch, out, round_q4);
  take_over_row(view, r, out, [](const Group& from, StoredGroup& to) {
    to.scale = f16_of_float(from.scale[0]);
    to.shift = f16_of_float(from.shift[0] - from.scale[0] * static_cast<float>(from.zero));
    std::copy_n(from.q, kGroup, to.q);
  });
}

float quantize_bytes(const float* x, std::int64_t n, std::uint8_t* out) {
  const float bad = not_finite(x, n), scale = largest_size(x, n) / 127;
  store_offset(x, bad != 0 ? 0 : n, inverse_of(scale), out);
  std::fill(out, out + (bad != 0 ? n : 0), std::uint8_t{128});
  return bad != 0 ? bad : scale;
}

}  // namespace unshard::inference
