#include "inference/weights/gguf_blocks.h"

#include <cstring>

#include "inference/weights/half.h"
#include "unshard/core/error.h"

namespace unshard::inference {
namespace {

using Bytes = const std::uint8_t*;

float half_at(Bytes p) {
  std::uint16_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return float_of_f16(bits);
}

void set_scales(Group& group, float scale, float shift, std::int32_t zero) {
  group.scale[0] = group.scale[1] = scale;
  group.shift[0] = group.shift[1] = shift;
  group.zero = zero;
}

/// 16 bytes: values 0..15 in the low halves, 16..31 in the high ones.
void unpack_nibbles(Bytes packed, std::uint8_t* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = packed[i] & 15;
    q[i + 16] = packed[i] >> 4;
  }
}

void add_fifth_bits(Bytes bits, std::uint8_t* q) {
  for (int i = 0; i < 32; ++i) q[i] = static_cast<std::uint8_t>(q[i] | (((bits[i / 8] >> (i % 8)) & 1) << 4));
}

void q4_0(Bytes block, Group* out) {
  set_scales(*out, half_at(block), 0, 8);
  unpack_nibbles(block + 2, out->q);
}
void q4_1(Bytes block, Group* out) {
  set_scales(*out, half_at(block), half_at(block + 2), 0);
  unpack_nibbles(block + 4, out->q);
}
void q5_0(Bytes block, Group* out) {
  set_scales(*out, half_at(block), 0, 16);
  unpack_nibbles(block + 6, out->q);
  add_fifth_bits(block + 2, out->q);
}
void q5_1(Bytes block, Group* out) {
  set_scales(*out, half_at(block), half_at(block + 2), 0);
  unpack_nibbles(block + 8, out->q);
  add_fifth_bits(block + 4, out->q);
}
void q8_0(Bytes block, Group* out) {
  set_scales(*out, half_at(block), 0, 128);
  for (int i = 0; i < 32; ++i) out->q[i] = block[2 + i] ^ 0x80;  // signed to offset by 128
}

// K kinds: 256 values, 8 groups. Two groups of each 64 (four of each 128 in 2, 3 and 6 bits) lie in the same bytes at different bits.

/// scales[16] (4 bits scale, 4 bits minimum of each 16 values), q[64] (2 bits), d, dmin.
void q2_k(Bytes block, Group* out) {
  const Bytes scales = block, packed = block + 16;
  const float d = half_at(block + 80), dmin = half_at(block + 82);
  for (int g = 0; g < 8; ++g) {
    for (int half = 0; half < 2; ++half) {
      const int both = scales[2 * g + half];
      out[g].scale[half] = d * static_cast<float>(both & 15);
      out[g].shift[half] = -(dmin * static_cast<float>(both >> 4));
    }
    out[g].zero = 0;
    for (int i = 0; i < 32; ++i) out[g].q[i] = (packed[32 * (g / 4) + i] >> (2 * (g % 4))) & 3;
  }
}

/// third bit[32], q[64] (2 bits), scales[12] (6 bits of each 16 values: 4 low bits in the first 8 bytes, 2 high bits in the last 4), d.
void q3_k(Bytes block, Group* out) {
  const Bytes third = block, packed = block + 32, scales = block + 96;
  const float d = half_at(block + 108);
  for (int g = 0; g < 8; ++g) {
    for (int half = 0; half < 2; ++half) {
      const int s = 2 * g + half, low = s < 8 ? scales[s] & 15 : scales[s - 8] >> 4, high = (scales[8 + s % 4] >> (2 * (s / 4))) & 3;
      out[g].scale[half] = d * static_cast<float>((low | (high << 4)) - 32);
      out[g].shift[half] = 0;
    }
    out[g].zero = 4;
    for (int i = 0; i < 32; ++i) {
      const int low = (packed[32 * (g / 4) + i] >> (2 * (g % 4))) & 3, high = (third[i] >> g) & 1;
      out[g].q[i] = static_cast<std::uint8_t>(low | (high << 2));
    }
  }
}

/// 12 bytes: 6 bits scale and 6 bits minimum of each of 8 groups; the upper two bits of groups 4..7 lie in the bytes of 0..3.
void set_k_scales(Bytes scales, float d, float dmin, int g, Group& out) {
  int scale = 0, minimum = 0;
  if (g < 4) {
    scale = scales[g] & 63;
    minimum = scales[g + 4] & 63;
  } else {
    scale = (scales[g + 4] & 15) | ((scales[g - 4] >> 6) << 4);
    minimum = (scales[g + 4] >> 4) | ((scales[g] >> 6) << 4);
  }
  set_scales(out, d * static_cast<float>(scale), -(dmin * static_cast<float>(minimum)), 0);
}

/// d, dmin, scales[12], q[128] (4 bits).
void q4_k(Bytes block, Group* out) {
  const float d = half_at(block), dmin = half_at(block + 2);
  for (int g = 0; g < 8; ++g) {
    set_k_scales(block + 4, d, dmin, g, out[g]);
    for (int i = 0; i < 32; ++i) out[g].q[i] = (block[16 + 32 * (g / 2) + i] >> (4 * (g % 2))) & 15;
  }
}

/// d, dmin, scales[12], fifth bit[32], q[128] (4 bits).
void q5_k(Bytes block, Group* out) {
  const float d = half_at(block), dmin = half_at(block + 2);
  for (int g = 0; g < 8; ++g) {
    set_k_scales(block + 4, d, dmin, g, out[g]);
    for (int i = 0; i < 32; ++i) {
      const int low = (block[48 + 32 * (g / 2) + i] >> (4 * (g % 2))) & 15, high = (block[16 + i] >> g) & 1;
      out[g].q[i] = static_cast<std::uint8_t>(low | (high << 4));
    }
  }
}

/// low[128] (4 bits), high[64] (2 bits), scales[16] (signed, of each 16 values), d.
void q6_k(Bytes block, Group* out) {
  const float d = half_at(block + 208);
  for (int g = 0; g < 8; ++g) {
    for (int half = 0; half < 2; ++half) {
      out[g].scale[half] = d * static_cast<float>(static_cast<std::int8_t>(block[192 + 2 * g + half]));
      out[g].shift[half] = 0;
    }
    out[g].zero = 32;
    const Bytes low = block + 64 * (g / 4) + 32 * (g % 2), high = block + 128 + 32 * (g / 4);
    for (int i = 0; i < 32; ++i) {
      out[g].q[i] = static_cast<std::uint8_t>(((low[i] >> (4 * (g % 4 / 2))) & 15) | (((high[i] >> (2 * (g % 4))) & 3) << 4));
    }
  }
}

struct Format {
  const char* name;
  std::int64_t values, bytes;
  void (*unpack)(Bytes block, Group* out);
};

/// In FileType's order.
constexpr Format kFormats[] = {{"f32", 1, 4, nullptr},  {"f16", 1, 2, nullptr},   {"bf16", 1, 2, nullptr},  {"q4_0", 32, 18, q4_0},
                               {"q4_1", 32, 20, q4_1},  {"q5_0", 32, 22, q5_0},   {"q5_1", 32, 24, q5_1},   {"q8_0", 32, 34, q8_0},
                               {"q2_k", 256, 84, q2_k}, {"q3_k", 256, 110, q3_k}, {"q4_k", 256, 144, q4_k}, {"q5_k", 256, 176, q5_k},
                               {"q6_k", 256, 210, q6_k}};

const Format& format_of(FileType type) {
  const auto index = static_cast<std::size_t>(type);
  UNSHARD_DCHECK(index < std::size(kFormats), "FileType ", index);
  return kFormats[index];
}

template <class Read>
void expand_halves(const void* row, std::int64_t count, float* out, Read read) {
  const auto* p = static_cast<Bytes>(row);
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint16_t bits;
    std::memcpy(&bits, p + 2 * i, sizeof bits);
    out[i] = read(bits);
  }
}

}  // namespace

const char* file_type_name(FileType type) { return format_of(type).name; }
std::int64_t block_values(FileType type) { return format_of(type).values; }
std::int64_t block_bytes(FileType type) { return format_of(type).bytes; }
bool is_quantised(FileType type) { return format_of(type).unpack != nullptr; }

void unpack_groups(FileType type, const void* row, std::int64_t groups, Group* out) {
  const Format& format = format_of(type);
  const std::int64_t per_block = format.values / kGroupValues;
  const auto* block = static_cast<Bytes>(row);
  for (std::int64_t g = 0; g < groups; g += per_block, block += format.bytes) format.unpack(block, out + g);
}

void expand_row(const WeightView& view, std::int64_t r, float* out) {
  const void* row = view.row(r);
  switch (view.type) {
    case FileType::f32:
      std::memcpy(out, row, static_cast<std::size_t>(view.cols) * sizeof(float));
      return;
    case FileType::f16:
      return expand_halves(row, view.cols, out, float_of_f16);
    case FileType::bf16:
      return expand_halves(row, view.cols, out, float_of_bf16);
    default:
      break;
  }
  const Format& format = format_of(view.type);
  Group groups[8];
  const auto* block = static_cast<Bytes>(row);
  for (std::int64_t begin = 0; begin < view.cols; begin += format.values, block += format.bytes) {
    format.unpack(block, groups);
    for (std::int64_t i = 0; i < format.values; ++i) {
      const Group& group = groups[i / 32];
      const auto half = (i % 32) / 16;
      out[begin + i] = group.scale[half] * static_cast<float>(group.q[i % 32] - group.zero) + group.shift[half];
    }
  }
}

}  // namespace unshard::inference
