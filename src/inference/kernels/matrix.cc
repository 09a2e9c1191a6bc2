#include "inference/kernels/matrix.h"

#include <algorithm>

#include "inference/kernels/matrix_internal.h"
#include "unshard/core/error.h"

namespace unshard::inference {
namespace {

/// Rows of all parts as one list: part and row of each.
struct Rows {
  std::span<const WeightView> parts;
  void find(std::int64_t r, const WeightView*& view, std::int64_t& row) const {
    for (const WeightView& part : parts) {
      if (r < part.rows) {
        view = &part;
        row = r;
        return;
      }
      r -= part.rows;
    }
  }
};

void check_parts(std::span<const WeightView> parts, WeightType type) {
  require(!parts.empty(), "[inference.pack] no parts");
  const std::int64_t cols = parts.front().cols;
  for (const WeightView& part : parts) {
    require(part.rows > 0 && part.cols == cols && cols > 0, "[inference.pack] ", part.name, " is [", part.rows, ", ", part.cols,
            "]; wanted are rows > 0 and ", cols, " cols as in ", parts.front().name);
    require(cols % block_values(part.type) == 0, "[inference.pack] ", part.name, " has ", cols, " cols; ", file_type_name(part.type),
            " holds them in blocks of ", block_values(part.type));
    require((type != WeightType::q8 && type != WeightType::q4) || cols % kGroup == 0, "[inference.pack] ", part.name, " has ", cols,
            " cols; ", weight_type_name(type), " wants a multiple of ", kGroup, ": use bf16 or w8a8 for it");
    require(type != WeightType::w8a8 || cols <= 65536, "[inference.pack] ", part.name, " has ", cols,
            " cols; w8a8 takes at most 65536 (its sums are int32)");
  }
}

}  // namespace

Matrix::Matrix() = default;
Matrix::~Matrix() = default;
Matrix::Matrix(Matrix&&) noexcept = default;
Matrix& Matrix::operator=(Matrix&&) noexcept = default;

std::int64_t Matrix::rows() const { return packed_->rows; }
std::int64_t Matrix::cols() const { return packed_->cols; }
WeightType Matrix::type() const { return packed_->type; }
std::int64_t Matrix::bytes() const { return packed_->bytes; }

namespace {

std::unique_ptr<Matrix::Packed> described(std::span<const WeightView> parts, WeightType type, bool gated) {
  check_parts(parts, type);
  auto packed = std::make_unique<Matrix::Packed>();
  packed->kernels = &current_kernels();
  packed->type = type;
  packed->gated = gated;
  for (const WeightView& part : parts) packed->rows += part.rows;
  packed->cols = parts.front().cols;
  packed->steps = row_steps(type, packed->cols);
  const std::int64_t n = gated ? packed->gate_rows() : packed->rows;
  packed->panels = (n + kPanelRows - 1) / kPanelRows * (gated ? 2 : 1);
  packed->bytes = packed->panels * panel_bytes(type, packed->cols);
  return packed;
}

/// The row of all parts that is lane `lane` of panel `p`; -1: none.
std::int64_t row_of(const Matrix::Packed& packed, std::int64_t p, int lane) {
  const std::int64_t n = packed.gated ? packed.gate_rows() : packed.rows;
  const std::int64_t r = (packed.gated ? p / 2 : p) * kPanelRows + lane;
  if (r >= n) return -1;
  return packed.gated ? r + p % 2 * n : r;
}

void pack_rows(Matrix::Packed& packed, std::span<const WeightView> parts, Workers& workers) {
  packed.data = allocate(packed.bytes);
  workers.parallel_for(packed.panels, 4, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> scratch;
    for (std::int64_t p = begin; p < end; ++p) {
      PanelRows rows;
      for (int lane = 0; lane < kPanelRows; ++lane) {
        const std::int64_t r = row_of(packed, p, lane);
        if (r >= 0) Rows{parts}.find(r, rows.view[lane], rows.row[lane]);
      }
      pack_panel(packed, p, rows, scratch);
    }
  });
}

}  // namespace

Matrix Matrix::describe(std::span<const WeightView> parts, WeightType type, bool gated) {
  require(!gated || (parts.size() == 2 && parts[0].rows == parts[1].rows), "[inference.pack] ", parts.front().name, " has ",
          parts.front().rows, " rows, ", parts.back().name, " has ", parts.back().rows, "; they must be equal");
  Matrix result;
  result.packed_ = described(parts, type, gated);
  return result;
}

Matrix Matrix::pack(std::span<const WeightView> parts, WeightType type, Workers& workers) {
  Matrix result = describe(parts, type, false);
  pack_rows(*result.packed_, parts, workers);
  return result;
}

Matrix Matrix::pack_gated(const WeightView& gate, const WeightView& up, WeightType type, Workers& workers) {
  const WeightView parts[] = {gate, up};
  Matrix result = describe(parts, type, true);
  pack_rows(*result.packed_, parts, workers);
  return result;
}

void Matrix::expand_row(std::int64_t r, float* out) const {
  const Packed& packed = *packed_;
  UNSHARD_DCHECK(r >= 0 && r < packed.rows, "row ", r, " of ", packed.rows);
  if (!packed.gated) return unpack_row(packed, r / kPanelRows, static_cast<int>(r % kPanelRows), out);
  const std::int64_t n = packed.gate_rows(), row = r % n;
  unpack_row(packed, row / kPanelRows * 2 + r / n, static_cast<int>(row % kPanelRows), out);
}

Activations::Activations() : held_(std::make_unique<Held>()) {}
Activations::~Activations() = default;
std::int64_t Activations::tokens() const { return held_->tokens; }

void Activations::assign(const float* x, std::int64_t tokens, std::int64_t cols, std::int64_t stride, WeightType type, Workers& workers) {
  Held& held = *held_;
  held.kernels = &current_kernels();
  held.type = type;
  held.tokens = tokens;
  held.cols = cols;
  held.stride = input_row_bytes(type, cols, held.kernels->bf16_pairs);
  if (held.stride * tokens > held.capacity) {
    held.data = allocate(held.stride * tokens);
    held.capacity = held.stride * tokens;
  }
  const auto input = held.kernels->input[static_cast<int>(type)];
  const auto rows = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) input(x + t * stride, cols, held.data.get() + t * held.stride);
  };
  constexpr std::int64_t kAlone = 16384;  // values that one core rounds in about the time that waking another takes
  if (tokens * cols <= kAlone) return rows(0, tokens);
  workers.parallel_for(tokens, std::max<std::int64_t>(1, kAlone / 2 / cols), rows);
}

}  // namespace unshard::inference
