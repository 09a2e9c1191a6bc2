// Sizes and places in packed matrices and held activations; see matrix_kernels.h.
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <new>

#include "inference/kernels/matrix_internal.h"

namespace unshard::inference {
namespace {

constexpr std::int64_t kLine = 64, kHugePage = std::int64_t{2} << 20;

}  // namespace

const char* weight_type_name(WeightType type) {
  constexpr const char* names[] = {"f32", "f16", "bf16", "q8", "q4", "w8a8"};
  return names[static_cast<int>(type)];
}

std::int64_t row_steps(WeightType type, std::int64_t cols) {
  constexpr std::int64_t values[] = {1, 1, 2, kGroup, kGroup, 4};
  const std::int64_t step = values[static_cast<int>(type)];
  return (cols + step - 1) / step;
}

std::int64_t step_bytes(WeightType type) {
  constexpr std::int64_t bytes[] = {64, 32, 64, kQ8GroupBytes, kQ4GroupBytes, 64};
  return bytes[static_cast<int>(type)];
}

std::int64_t panel_bytes(WeightType type, std::int64_t cols) {
  const std::int64_t scales = type == WeightType::w8a8 ? kPanelRows * static_cast<std::int64_t>(sizeof(float)) : 0;
  return row_steps(type, cols) * step_bytes(type) + scales;
}

std::int64_t input_row_bytes(WeightType type, std::int64_t cols, bool bf16_pairs) {
  std::int64_t bytes = round_up(cols, 16) * 4;
  if (type == WeightType::bf16 && bf16_pairs) bytes = round_up(cols, 16) * 2;
  if (type == WeightType::q8 || type == WeightType::q4) bytes = row_steps(type, cols) * static_cast<std::int64_t>(sizeof(InputGroup));
  if (type == WeightType::w8a8) bytes = round_up(cols, 16) + static_cast<std::int64_t>(sizeof(InputTail));
  const std::int64_t lines = (bytes + kLine - 1) / kLine;
  return (lines | 1) * kLine;
}

Memory allocate(std::int64_t bytes) {
  const std::int64_t size = round_up(std::max<std::int64_t>(bytes, kLine), bytes >= kHugePage ? 4096 : kLine);
  Memory memory(static_cast<std::uint8_t*>(
      std::aligned_alloc(static_cast<std::size_t>(bytes >= kHugePage ? 4096 : kLine), static_cast<std::size_t>(size))));
  if (memory == nullptr) throw std::bad_alloc();
#if defined(__linux__)
  // Only a wish: without huge pages the same code runs, with more address translations.
  if (bytes >= kHugePage) static_cast<void>(madvise(memory.get(), static_cast<std::size_t>(size), MADV_HUGEPAGE));
#endif
  return memory;
}

int Matrix::Packed::tile_panels(std::int64_t tile) const {
  return static_cast<int>(std::min<std::int64_t>(kernels->tile_panels, panels - tile * kernels->tile_panels));
}

std::uint8_t* Matrix::Packed::tile(std::int64_t tile) const { return data.get() + tile * kernels->tile_panels * panel_bytes(type, cols); }

}  // namespace unshard::inference
