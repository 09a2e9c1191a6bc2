// Rows of a file into panels, and back for embeddings; see matrix_kernels.h for what lies where.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "inference/kernels/matrix_internal.h"
#include "inference/kernels/quantize.h"
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

/// Rows whose format is the packed one: steps of type U as they are. `odd`: the last step is half there.
template <class U>
void copy_steps(const Matrix::Packed& packed, const Place& place, const PanelRows& rows, bool odd) {
  const std::int64_t whole = packed.steps - (odd ? 1 : 0);
  for (int lane = 0; lane < kPanelRows; ++lane) {
    std::uint8_t* out = place.first + lane * static_cast<int>(sizeof(U));
    const auto* row = rows.view[lane] == nullptr ? nullptr : static_cast<const std::uint8_t*>(rows.view[lane]->row(rows.row[lane]));
    for (std::int64_t step = 0; step < whole; ++step) {
      put(out + step * place.stride, row == nullptr ? U{0} : get<U>(row + step * static_cast<std::int64_t>(sizeof(U))));
    }
    if (!odd) continue;
    U last = 0;
    if (row != nullptr) std::memcpy(&last, row + whole * static_cast<std::int64_t>(sizeof(U)), sizeof(U) / 2);
    put(out + whole * place.stride, last);
  }
}

/// \return whether the panel could be copied
bool copy_panel(const Matrix::Packed& packed, const Place& place, const PanelRows& rows) {
  const auto all = [&](FileType type) {
    return std::all_of(std::begin(rows.view), std::end(rows.view), [type](const WeightView* v) { return v == nullptr || v->type == type; });
  };
  if (packed.type == WeightType::f32 && all(FileType::f32)) {
    copy_steps<std::uint32_t>(packed, place, rows, false);
  } else if (packed.type == WeightType::f16 && all(FileType::f16)) {
    copy_steps<std::uint16_t>(packed, place, rows, false);
  } else if (packed.type == WeightType::bf16 && all(FileType::bf16)) {
    copy_steps<std::uint32_t>(packed, place, rows, packed.cols % 2 != 0);
  } else {
    return false;
  }
  return true;
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

void pack_group(WeightType type, int lane, const StoredGroup& group, std::uint8_t* out) {
  put(out + 2 * lane, group.scale);
  if (type == WeightType::q8) {
    for (int j = 0; j < 8; ++j) std::memcpy(out + 32 + 64 * j + 4 * lane, group.q + 4 * j, 4);
    return;
  }
  put(out + 32 + 2 * lane, group.shift);
  for (int i = 0; i < 16; ++i) out[64 + 64 * (i / 4) + 4 * lane + i % 4] = static_cast<std::uint8_t>(group.q[i] | (group.q[16 + i] << 4));
}

void pack_groups(const Matrix::Packed& packed, const Place& place, const PanelRows& rows, std::vector<float>& scratch) {
  StoredGroup none;  // rows that are missing: zeros
  if (packed.type == WeightType::q8) std::fill(none.q, none.q + kGroup, std::uint8_t{128});
  std::vector<StoredGroup> groups(static_cast<std::size_t>(packed.steps));
  for (int lane = 0; lane < kPanelRows; ++lane) {
    const WeightView* view = rows.view[lane];
    if (view == nullptr) {
      std::fill(groups.begin(), groups.end(), none);
    } else {
      (packed.type == WeightType::q8 ? quantize_row_q8 : quantize_row_q4)(*packed.kernels, *view, rows.row[lane], scratch, groups.data());
    }
    for (std::int64_t step = 0; step < packed.steps; ++step) {
      pack_group(packed.type, lane, groups[static_cast<std::size_t>(step)], place.first + step * place.stride);
    }
  }
}

void pack_bytes(const Matrix::Packed& packed, const Place& place, const float* rows, std::int64_t stride) {
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(packed.steps * 4), 128);
  for (int lane = 0; lane < kPanelRows; ++lane) {
    place.scales[lane] = packed.kernels->round_bytes(rows + lane * stride, packed.cols, bytes.data());
    for (std::int64_t step = 0; step < packed.steps; ++step) {
      std::memcpy(place.first + step * place.stride + 4 * lane, bytes.data() + 4 * step, 4);
    }
  }
}

}  // namespace

void pack_panel(const Matrix::Packed& packed, std::int64_t p, const PanelRows& rows, std::vector<float>& scratch) {
  const Place place = place_of(packed, p);
  if (packed.type == WeightType::q8 || packed.type == WeightType::q4) return pack_groups(packed, place, rows, scratch);
  if (copy_panel(packed, place, rows)) return;
  const std::int64_t stride = round_up(packed.cols, kGroup);
  scratch.assign(static_cast<std::size_t>(kPanelRows * stride), 0.0F);
  for (int lane = 0; lane < kPanelRows; ++lane) {
    if (rows.view[lane] != nullptr) expand_row(*rows.view[lane], rows.row[lane], scratch.data() + lane * stride);
  }
  (packed.type == WeightType::w8a8 ? pack_bytes : pack_floats)(packed, place, scratch.data(), stride);
}

void unpack_row(const Matrix::Packed& packed, std::int64_t p, int lane, float* out) {
  const Place place = place_of(packed, p);
  const auto step_of = [&](std::int64_t k, std::int64_t values) { return place.first + k / values * place.stride; };
  for (std::int64_t k = 0; k < packed.cols; ++k) {
    const std::int64_t in_group = k % kGroup;
    switch (packed.type) {
      case WeightType::f32:
        out[k] = get<float>(step_of(k, 1) + 4 * lane);
        break;
      case WeightType::f16:
        out[k] = float_of_f16(get<std::uint16_t>(step_of(k, 1) + 2 * lane));
        break;
      case WeightType::bf16:
        out[k] = float_of_bf16(get<std::uint16_t>(step_of(k, 2) + 4 * lane + 2 * (k % 2)));
        break;
      case WeightType::w8a8:
        out[k] = place.scales[lane] * static_cast<float>(step_of(k, 4)[4 * lane + k % 4] - 128);
        break;
      case WeightType::q8: {
        const std::uint8_t* group = step_of(k, kGroup);
        const int q = group[32 + 64 * (in_group / 4) + 4 * lane + in_group % 4];
        out[k] = float_of_f16(get<std::uint16_t>(group + 2 * lane)) * static_cast<float>(q - 128);
        break;
      }
      case WeightType::q4: {
        const std::uint8_t* group = step_of(k, kGroup);
        const int both = group[64 + 64 * (in_group % 16 / 4) + 4 * lane + in_group % 4], q = in_group < 16 ? both & 15 : both >> 4;
        out[k] = float_of_f16(get<std::uint16_t>(group + 2 * lane)) * static_cast<float>(q) +
                 float_of_f16(get<std::uint16_t>(group + 32 + 2 * lane));
        break;
      }
    }
  }
}

}  // namespace unshard::inference
