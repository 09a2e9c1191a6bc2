// Rows of a file into panels, and back for embeddings; see matrix_kernels.h for what lies where.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "inference/kernels/matrix_internal.h"
#include "inference/weights/gguf_blocks.h"
#include "inference/weights/half.h"

namespace unshard::inference {
namespace {

/// Where the vectors of one panel lie: step s begins at first + s * stride.
struct Place {
  std::uint8_t* first;
  std::int64_t stride;
  float* scales;  ///< w8a8
};

Place place_of(const Matrix::Packed& packed, std::int64_t p) {
  const std::int64_t tile = p / packed.kernels->tile_panels, inside = p % packed.kernels->tile_panels, panels = packed.tile_panels(tile);
  std::uint8_t* begin = packed.tile(tile);
  const std::int64_t bytes = step_bytes(packed.type);
  if (packed.type == WeightType::q8 || packed.type == WeightType::q4) return {begin + inside * packed.steps * bytes, bytes, nullptr};
  auto* scales = reinterpret_cast<float*>(begin + packed.steps * panels * bytes) + inside * kPanelRows;
  return {begin + inside * bytes, panels * bytes, scales};
}

template <class T>
void put(std::uint8_t* p, T value) {
  std::memcpy(p, &value, sizeof value);
}
template <class T>
T get(const std::uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

void pack_floats(const Matrix::Packed& packed, const Place& place, const float* rows, std::int64_t stride) {
  for (std::int64_t step = 0; step < packed.steps; ++step) {
    std::uint8_t* out = place.first + step * place.stride;
    for (int lane = 0; lane < kPanelRows; ++lane) {
      const float* row = rows + lane * stride;
      if (packed.type == WeightType::f32) put(out + 4 * lane, row[step]);
      if (packed.type == WeightType::f16) put(out + 2 * lane, f16_of_float(row[step]));
      if (packed.type == WeightType::bf16) {
        put(out + 4 * lane, bf16_of_float(row[2 * step]));
        put(out + 4 * lane + 2, bf16_of_float(row[2 * step + 1]));
      }
    }
  }
}

}  // namespace

void pack_panel(const Matrix::Packed& packed, std::int64_t p, const PanelRows& rows, std::vector<float>& scratch) {
  const std::int64_t stride = round_up(packed.cols, kGroup);
  scratch.assign(static_cast<std::size_t>(kPanelRows * stride), 0.0F);
  for (int lane = 0; lane < kPanelRows; ++lane) {
    if (rows.view[lane] != nullptr) expand_row(*rows.view[lane], rows.row[lane], scratch.data() + lane * stride);
  }
  pack_floats(packed, place_of(packed, p), scratch.data(), stride);
}

void unpack_row(const Matrix::Packed& packed, std::int64_t p, int lane, float* out) {
  const Place place = place_of(packed, p);
  for (std::int64_t k = 0; k < packed.cols; ++k) {
    const auto step_of = [&](std::int64_t values) { return place.first + k / values * place.stride; };
    if (packed.type == WeightType::f32) out[k] = get<float>(step_of(1) + 4 * lane);
    if (packed.type == WeightType::f16) out[k] = float_of_f16(get<std::uint16_t>(step_of(1) + 2 * lane));
    if (packed.type == WeightType::bf16) out[k] = float_of_bf16(get<std::uint16_t>(step_of(2) + 4 * lane + 2 * (k % 2)));
  }
}

}  // namespace unshard::inference
