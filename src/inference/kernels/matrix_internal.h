#pragma once
// What Matrix and Activations hold, for matrix*.cc and its tests, and for weights that are streamed (inference/stream).
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "inference/kernels/matrix.h"
#include "inference/kernels/matrix_kernels.h"

namespace unshard::inference {

/// The kernels of this processor (UNSHARD_CPU_ISA lowers the choice), or of a ScopedKernels.
const MatrixKernels& current_kernels();
/// Each set of kernels that this processor can run, the best one last. For tests.
std::vector<const MatrixKernels*> runnable_kernels();

/// While it lives, this thread packs matrices and assigns activations for `kernels`. For tests.
class ScopedKernels {
 public:
  explicit ScopedKernels(const MatrixKernels& kernels);
  ~ScopedKernels();
  ScopedKernels(const ScopedKernels&) = delete;
  ScopedKernels& operator=(const ScopedKernels&) = delete;

 private:
  const MatrixKernels* before_;
};

inline std::int64_t round_up(std::int64_t value, std::int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

/// Steps along a row of `cols` values, and bytes of one step of one panel; see matrix_kernels.h.
std::int64_t row_steps(WeightType type, std::int64_t cols);
std::int64_t step_bytes(WeightType type);
/// Bytes of one panel: its steps, for w8a8 its scales too.
std::int64_t panel_bytes(WeightType type, std::int64_t cols);
/// Bytes from one token's inputs to the next: an odd number of cache lines, so that the rows of a tile don't meet in the same sets.
std::int64_t input_row_bytes(WeightType type, std::int64_t cols, bool bf16_pairs);

struct FreeMemory {
  bool owned = true;
  void operator()(std::uint8_t* p) const {
    if (owned) std::free(p);
  }
};
using Memory = std::unique_ptr<std::uint8_t, FreeMemory>;
/// 64-byte aligned, in huge pages where it is large and the system has them. \throws std::bad_alloc
Memory allocate(std::int64_t bytes);

struct Matrix::Packed {
  const MatrixKernels* kernels = nullptr;
  WeightType type = WeightType::f32;
  bool gated = false;     ///< panels alternate: 16 rows of gate, 16 of up
  std::int64_t rows = 0;  ///< as Matrix::rows()
  std::int64_t cols = 0, steps = 0, panels = 0, bytes = 0;
  Memory data;  ///< null: described only

  /// From now on its `bytes` lie at `memory`, 64-byte aligned and another's; null: nowhere. Memory of its own is freed.
  void place(std::uint8_t* memory) { data = Memory(memory, FreeMemory{false}); }
  std::int64_t tiles() const { return (panels + kernels->tile_panels - 1) / kernels->tile_panels; }
  int tile_panels(std::int64_t tile) const;
  std::uint8_t* tile(std::int64_t tile) const;
  /// Of gated matrices: rows of gate (and of up).
  std::int64_t gate_rows() const { return rows / 2; }
};

/// 16 rows before they are packed. A row may be missing (the last panel): zeros.
struct PanelRows {
  const WeightView* view[kPanelRows] = {};
  std::int64_t row[kPanelRows] = {};
};
/// Write panel `p` of `packed` (pack_panel.cc). `scratch` is reused between calls.
void pack_panel(const Matrix::Packed& packed, std::int64_t p, const PanelRows& rows, std::vector<float>& scratch);
/// Lane `lane` of panel `p` as floats.
void unpack_row(const Matrix::Packed& packed, std::int64_t p, int lane, float* out);

struct Activations::Held {
  const MatrixKernels* kernels = nullptr;
  WeightType type = WeightType::f32;
  std::int64_t tokens = 0, cols = 0, stride = 0, capacity = 0;
  Memory data;
};

}  // namespace unshard::inference
