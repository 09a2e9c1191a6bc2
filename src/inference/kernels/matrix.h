#pragma once
// Products with a weight matrix that is packed once for the processor's instruction set and read once a step.
// Shapes: T tokens of this step, K input features, N output features. y[T, N] = x[T, K] W[N, K]^T.
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "inference/kernels/workers.h"
#include "inference/weights/weight_view.h"

namespace unshard::inference {

/// How a packed matrix holds its values, and so in what its products are made (sums always in fp32 or int32):
///   f32, f16   fp32 products
///   bf16       inputs rounded to bf16 (VDPBF16PS where the processor has it)
///   q8, q4     groups of 32 along a row, value = scale * q (q8) or scale * q + shift (q4), both fp16; inputs rounded to int8 in groups of
///              32. The matrix is never expanded. GGUF's Q4_0, Q4_1, Q4_K (q4) and Q8_0, Q5_0, Q4_0 (q8) are taken over without rounding
///              their q again.
///   w8a8       one scale a row of W, int8; inputs int8 with one scale a token (ZeroQuant)
enum class WeightType { f32, f16, bf16, q8, q4, w8a8 };

const char* weight_type_name(WeightType type);

class Matrix {
 public:
  Matrix();
  ~Matrix();
  Matrix(Matrix&&) noexcept;
  Matrix& operator=(Matrix&&) noexcept;
  /// The rows of all `parts`, one after another (as Q, K, V share an input). All have equal cols, a multiple of 32 for q8 and q4.
  /// \throws std::invalid_argument naming the part
  static Matrix pack(std::span<const WeightView> parts, WeightType type, Workers& workers);
  /// As pack({gate, up}), laid out so that multiply_gated() can use it. Both are [N, K].
  static Matrix pack_gated(const WeightView& gate, const WeightView& up, WeightType type, Workers& workers);
  /// What pack() (of gate and up: pack_gated()) would make, but for its values, which are brought later (Packed::place()).
  static Matrix describe(std::span<const WeightView> parts, WeightType type, bool gated);

  std::int64_t rows() const;  ///< N (2 N of a gated one)
  std::int64_t cols() const;  ///< K
  WeightType type() const;
  std::int64_t bytes() const;  ///< as packed
  /// Row `r` as float [K], as products see it: for an embedding that is also the output matrix.
  void expand_row(std::int64_t r, float* out) const;

  struct Packed;
  /// At the same address for life, wherever the matrix is moved to.
  const Packed& packed() const { return *packed_; }
  Packed& packed() { return *packed_; }

 private:
  std::unique_ptr<Packed> packed_;
};

/// The input of products, cast or quantised once for all matrices of one type that read it. Reused between steps, without allocating again.
class Activations {
 public:
  Activations();
  ~Activations();
  /// \param x  [T, K], rows `stride` apart
  void assign(const float* x, std::int64_t tokens, std::int64_t cols, std::int64_t stride, WeightType type, Workers& workers);
  std::int64_t tokens() const;
  struct Held;
  const Held& held() const { return *held_; }

 private:
  std::unique_ptr<Held> held_;
};

struct Epilogue {
  const float* bias = nullptr;  ///< [N]
  bool accumulate = false;      ///< y += instead of y =
};

enum class Gate { silu, gelu_tanh, gelu };

/// y[T, N], rows `stride` apart. A token's row has the same bits whatever other tokens there are, and with any number of workers.
/// Activations of f32 and f16, and of q8 and q4, serve matrices of either. \throws std::invalid_argument  inputs of other cols or type
void multiply(const Matrix& matrix, const Activations& x, float* y, std::int64_t stride, const Epilogue& epilogue, Workers& workers);
/// y[T, N] = gate(x Wg^T) * (x Wu^T); bias: [2 N], gate's first.
void multiply_gated(const Matrix& matrix, const Activations& x, Gate gate, float* y, std::int64_t stride, const Epilogue& epilogue,
                    Workers& workers);

}  // namespace unshard::inference
