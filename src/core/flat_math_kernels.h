#pragma once
// What each instruction set supplies for flat_math.cc: passes over one range, on one thread. Plain types only (see the note in vec.h).
#include <cstdint>

namespace unshard::kernels {

enum class Element : int { f32 = 0, bf16 = 1, f16 = 2 };

struct Flat {
  void* data;
  Element element;
};

/// Blocks are the unit of the order of summation, and what threads share out.
inline constexpr std::int64_t kBlock = 4096;

struct FlatKernels {
  /// Elements [begin, end). All inputs have the element type of inputs[0] if `uniform`.
  void (*accumulate)(std::int64_t begin, std::int64_t end, Flat accumulator, const Flat* inputs, int count, bool uniform, bool first);
  /// Sum of squares of values [begin, end), at most kBlock of them.
  double (*block_squares)(std::int64_t begin, std::int64_t end, Flat values);
  void (*copy)(std::int64_t begin, std::int64_t end, Flat destination, Flat source, float scale);
};

const FlatKernels& flat_kernels_portable();
const FlatKernels& flat_kernels_avx2();
const FlatKernels& flat_kernels_avx512();

}  // namespace unshard::kernels
