// Products: which tile meets which tokens on which worker.
#include <algorithm>
#include <cmath>

#include "inference/kernels/matrix_internal.h"
#include "unshard/core/error.h"

namespace unshard::inference {
namespace {

/// Tiles whose results leave together: two for gated matrices, whose panels are pairs of gate and up.
constexpr int kMaxUnitTiles = 2;
constexpr int kMaxUnitRows = kMaxUnitTiles * kMaxTilePanels * kPanelRows;
/// Tokens whose sums wait while K goes by in pieces.
constexpr int kBlock = 64;
/// Bytes of a tile that stay in the second-level cache while tokens pass by.
constexpr std::int64_t kPieceBytes = 384 << 10;

struct Product {
  const Matrix::Packed& matrix;
  const Activations::Held& x;
  float* y;
  std::int64_t y_stride;
  const Epilogue& epilogue;
  Gate gate = Gate::silu;

  std::int64_t unit_tiles() const { return matrix.gated ? 2 : 1; }
  std::int64_t units() const { return (matrix.tiles() + unit_tiles() - 1) / unit_tiles(); }
};

/// Sums of tokens [first, first + count) with one tile, over steps [begin, end), into out [count, kMaxUnitRows].
void add_tile(const Product& product, std::int64_t tile, std::int64_t first, std::int64_t count, std::int64_t begin, std::int64_t end,
              float* out) {
  const MatrixKernels& kernels = *product.matrix.kernels;
  const TileKernel* table = kernels.tile[static_cast<int>(product.matrix.type)][product.matrix.tile_panels(tile) - 1];
  const std::int64_t groups = (count + kernels.tile_tokens - 1) / kernels.tile_tokens;
  std::int64_t token = 0;
  for (std::int64_t g = 0; g < groups; ++g) {  // of about equal size: 9 tokens are 5 and 4, since 8 and 1 would keep lanes waiting
    const std::int64_t tokens = (count - token + groups - g - 1) / (groups - g);
    table[tokens - 1]({product.matrix.tile(tile), product.x.data.get() + (first + token) * product.x.stride, product.x.stride, begin, end,
                       product.matrix.steps, out + token * kMaxUnitRows, kMaxUnitRows});
    token += tokens;
  }
}

void apply_gate(const Product& product, float* gate, const float* up, std::int64_t n) {
  if (product.gate == Gate::silu) return product.matrix.kernels->silu(gate, up, n);
  if (product.gate == Gate::gelu_tanh) return product.matrix.kernels->gelu_tanh(gate, up, n);
  for (std::int64_t i = 0; i < n; ++i) gate[i] = 0.5F * gate[i] * std::erfc(gate[i] * -0.70710678F) * up[i];
}

void finish_gated(const Product& product, std::int64_t unit, float* sums, float* y) {
  const MatrixKernels& kernels = *product.matrix.kernels;
  const float* bias = product.epilogue.bias;
  const std::int64_t n = product.matrix.gate_rows(), unit_panels = 2 * kernels.tile_panels;
  for (std::int64_t p = 0; p < unit_panels; p += 2) {
    const std::int64_t row = (unit * unit_panels + p) / 2 * kPanelRows, count = std::min<std::int64_t>(kPanelRows, n - row);
    if (count <= 0) return;
    float *gate = sums + p * kPanelRows, *up = gate + kPanelRows;
    if (bias != nullptr) {
      kernels.finish(gate, bias + row, false, count, gate);
      kernels.finish(up, bias + n + row, false, count, up);
    }
    apply_gate(product, gate, up, count);
    kernels.finish(gate, nullptr, product.epilogue.accumulate, count, y + row);
  }
}

void finish_plain(const Product& product, std::int64_t unit, const float* sums, float* y) {
  const MatrixKernels& kernels = *product.matrix.kernels;
  const std::int64_t row = unit * kernels.tile_panels * kPanelRows;
  const std::int64_t count = std::min<std::int64_t>(kernels.tile_panels * kPanelRows, product.matrix.rows - row);
  const float* bias = product.epilogue.bias;
  kernels.finish(sums, bias == nullptr ? nullptr : bias + row, product.epilogue.accumulate, count, y + row);
}

/// One unit of tiles, tokens [first, first + count).
void compute_unit(const Product& product, std::int64_t unit, std::int64_t first, std::int64_t count) {
  alignas(64) float sums[kBlock * kMaxUnitRows];
  const Matrix::Packed& matrix = product.matrix;
  const MatrixKernels& kernels = *matrix.kernels;
  const std::int64_t piece = std::max<std::int64_t>(1, kPieceBytes / (kernels.tile_panels * step_bytes(matrix.type)));
  const bool whole = matrix.steps <= piece + piece / 2;
  const std::int64_t block = whole ? kernels.tile_tokens : kBlock, length = whole ? matrix.steps : piece;
  const std::int64_t tile_begin = unit * product.unit_tiles(), tile_end = std::min(tile_begin + product.unit_tiles(), matrix.tiles());
  for (std::int64_t done = 0; done < count; done += block) {
    const std::int64_t tokens = std::min(block, count - done);
    for (std::int64_t tile = tile_begin; tile < tile_end; ++tile) {
      float* out = sums + (tile - tile_begin) * kernels.tile_panels * kPanelRows;
      for (std::int64_t begin = 0; begin < matrix.steps; begin += length) {
        add_tile(product, tile, first + done, tokens, begin, std::min(begin + length, matrix.steps), out);
      }
    }
    for (std::int64_t t = 0; t < tokens; ++t) {
      float* y = product.y + (first + done + t) * product.y_stride;
      matrix.gated ? finish_gated(product, unit, sums + t * kMaxUnitRows, y) : finish_plain(product, unit, sums + t * kMaxUnitRows, y);
    }
  }
}

/// Units of tiles are handed out, for few tiles and many tokens in pieces of tokens too.
void compute(const Product& product, Workers& workers) {
  const std::int64_t tokens = product.x.tokens, units = product.units();
  const std::int64_t unit_bytes =
      product.unit_tiles() * product.matrix.kernels->tile_panels * panel_bytes(product.matrix.type, product.matrix.cols);
  if (tokens == 0) return;
  constexpr std::int64_t kAloneBytes = 64 << 10;  // of weights: read by one core in about the time that waking another takes
  if (product.matrix.bytes * std::min<std::int64_t>(tokens, 8) <= kAloneBytes) {
    for (std::int64_t unit = 0; unit < units; ++unit) compute_unit(product, unit, 0, tokens);
    return;
  }
  const std::int64_t wanted = 8 * workers.count();
  const std::int64_t pieces = std::clamp<std::int64_t>((wanted + units - 1) / units, 1, std::max<std::int64_t>(1, tokens / kBlock));
  const std::int64_t piece = (tokens + pieces - 1) / pieces;
  const std::int64_t grain = std::clamp<std::int64_t>(kAloneBytes / unit_bytes, 1, std::max<std::int64_t>(1, units * pieces / wanted));
  workers.parallel_for(units * pieces, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t first = i / units * piece;
      compute_unit(product, i % units, first, std::min(piece, tokens - first));
    }
  });
}

bool same_inputs(WeightType a, WeightType b) {
  const auto groups = [](WeightType type) { return type == WeightType::q8 || type == WeightType::q4; };
  const auto floats = [](WeightType type) { return type == WeightType::f32 || type == WeightType::f16; };
  return a == b || (groups(a) && groups(b)) || (floats(a) && floats(b));
}

void check(const Product& product) {
  const Matrix::Packed& matrix = product.matrix;
  require(product.x.cols == matrix.cols && same_inputs(product.x.type, matrix.type), "[inference.multiply] inputs have ", product.x.cols,
          " cols for ", weight_type_name(product.x.type), "; the matrix has ", matrix.cols, " and is ", weight_type_name(matrix.type));
  UNSHARD_DCHECK(product.x.kernels == matrix.kernels, "inputs and matrix were packed for different instruction sets");
}

}  // namespace

void multiply(const Matrix& matrix, const Activations& x, float* y, std::int64_t stride, const Epilogue& epilogue, Workers& workers) {
  const Product product = {matrix.packed(), x.held(), y, stride, epilogue};
  check(product);
  UNSHARD_DCHECK(!product.matrix.gated, "a gated matrix wants multiply_gated()");
  compute(product, workers);
}

void multiply_gated(const Matrix& matrix, const Activations& x, Gate gate, float* y, std::int64_t stride, const Epilogue& epilogue,
                    Workers& workers) {
  const Product product = {matrix.packed(), x.held(), y, stride, epilogue, gate};
  check(product);
  UNSHARD_DCHECK(product.matrix.gated, "multiply_gated() wants a matrix of pack_gated()");
  compute(product, workers);
}

}  // namespace unshard::inference
