#pragma once
// What one instruction set does for products: the inner loops, called by matrix.cc through a table. No standard library here: this header
// is part of sources that are compiled for one instruction set ([Note: one source, three instruction sets] in core/vec.h).
//
// [Note: panels and tiles] A packed matrix is panels of 16 rows, a tile is up to MatrixKernels::tile_panels of them. Within a tile, for
// each step along K all panels' vectors lie one after another, so that a product reads the matrix from one end to the other. A vector holds
// one step of 16 rows: lanes are output features and sums never cross lanes.
//   f32, f16  a step is one k: 16 values
//   bf16      a step is two k: 16 pairs (what VDPBF16PS wants)
//   w8a8      a step is four k: 16 times 4 values plus 128 (what VPDPBUSD wants); then a float scale a row
//   q8        panel after panel; a step is a group of 32 k: 16 scales (fp16), then 8 vectors as in w8a8
//   q4        the same with 16 scales, 16 shifts, then 4 vectors: low half bytes are k 0..15, high half bytes k 16..31 of the group
//
// [Note: one order of sums] A result is one chain of sums along K, the same in every kernel of an instruction set, whatever the number of
// tokens beside it; where K is cut in pieces the chain goes through memory as the same fp32 (or int32) numbers. So a token's results have
// the same bits alone and in a batch, and with any number of workers.
#include <cstdint>

namespace unshard::inference {

inline constexpr int kPanelRows = 16;
inline constexpr int kGroup = 32;  ///< k a group of q8 and q4
inline constexpr int kMaxTilePanels = 3;
inline constexpr int kMaxTileTokens = 8;
inline constexpr int kWeightTypes = 6;  ///< WeightType's values index the tables below
inline constexpr int kQ8GroupBytes = 32 + 8 * 64;
inline constexpr int kQ4GroupBytes = 64 + 4 * 64;

/// 32 inputs of q8 and q4.
struct InputGroup {
  std::int8_t q[kGroup];
  float scale;
  float sum;            ///< scale * (sum of q), for the weights' shift
  std::int32_t offset;  ///< -128 * (sum of q), for weights that are stored plus 128
  std::int32_t unused;
};

/// What follows a w8a8 row's inputs.
struct InputTail {
  float scale;
  std::int32_t offset;  ///< -128 * (sum of q)
};

/// 32 weights as q8 and q4 hold them. q8: scale * (q - 128), shift is 0. q4: scale * q + shift, q below 16. Scale and shift are fp16.
struct StoredGroup {
  std::uint16_t scale = 0, shift = 0;
  std::uint8_t q[kGroup] = {};
};

struct TileArgs {
  const std::uint8_t* weights;  ///< of the tile
  const std::uint8_t* inputs;   ///< the first token's row
  std::int64_t input_stride;    ///< bytes between tokens
  std::int64_t begin, end;      ///< steps along K of this call
  std::int64_t steps;           ///< of the whole row
  float* out;                   ///< [tokens, out_stride]; goes on from what is there where begin > 0
  std::int64_t out_stride;
};
using TileKernel = void (*)(const TileArgs& args);

struct MatrixKernels {
  const char* name;
  int tile_panels, tile_tokens;                                   ///< at most kMaxTilePanels, kMaxTileTokens
  bool bf16_pairs;                                                ///< bf16 inputs are held as bf16, not as floats
  TileKernel tile[kWeightTypes][kMaxTilePanels][kMaxTileTokens];  ///< [type][panels - 1][tokens - 1]
  /// One row of inputs as kernels of the type want it; `cols` values, `row` has input_row_bytes() (matrix_internal.h).
  void (*input[kWeightTypes])(const float* x, std::int64_t cols, std::uint8_t* row);
  /// 32 weights into a group: q8 by their largest size, q4 by the best fit of several. Weights that aren't finite make the scale NaN.
  void (*round_q8)(const float* x, StoredGroup& out);
  void (*round_q4)(const float* x, StoredGroup& out);
  /// out[i] = 128 + round(x[i] / scale); returns scale: largest |x| / 127
  float (*round_bytes)(const float* x, std::int64_t n, std::uint8_t* out);
  /// y[i] = sums[i] + (bias ? bias[i] : 0) + (accumulate ? y[i] : 0)
  void (*finish)(const float* sums, const float* bias, bool accumulate, std::int64_t n, float* y);
  /// gate[i] = gate[i] * sigmoid(gate[i]) * up[i], and with the tanh form of GELU
  void (*silu)(float* gate, const float* up, std::int64_t n);
  void (*gelu_tanh)(float* gate, const float* up, std::int64_t n);
};

/// What was built; only called where the processor has it.
const MatrixKernels& matrix_kernels_portable();
const MatrixKernels& matrix_kernels_avx2();
const MatrixKernels& matrix_kernels_avx512();
void use_avx512_vnni(MatrixKernels& kernels);  ///< replaces q8, q4, w8a8
void use_avx512_bf16(MatrixKernels& kernels);  ///< replaces bf16

}  // namespace unshard::inference
