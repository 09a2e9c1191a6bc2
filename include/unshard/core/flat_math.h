#pragma once
// Passes over flat CPU memory: vectorised (AVX-512, AVX2, portable, chosen at run time), split over at::get_num_threads() threads when
// large. An element's result never depends on its position, alignment, the piece it is in, the instruction set or the number of threads.
#include <c10/core/ScalarType.h>

#include <cstdint>

namespace unshard::kernels {

/// Memory of one flat array; dtype fp32, bf16 or fp16.
struct Array {
  void* data = nullptr;
  c10::ScalarType dtype = c10::ScalarType::Float;
};

/// accumulator = (first ? 0 : accumulator) + sum over r of inputs[r] (rank order, in fp32). The reduction of one bucket slice.
void accumulate(std::int64_t n, Array accumulator, const Array* inputs, int count, bool first);
/// Sum of squares (double, in a fixed order that depends on n only) and whether every element is finite.
struct Squares {
  double sum = 0;
  bool finite = true;
};
Squares sum_of_squares(std::int64_t n, Array values);
/// destination = source * scale with conversion (any of the three dtypes; memcpy when equal and scale is 1).
void copy(std::int64_t n, Array destination, Array source, double scale = 1);

/// "avx512", "avx2" or "portable"; what this process uses. UNSHARD_CPU_ISA=portable|avx2|avx512 (read once) lowers it for tests.
const char* isa();

}  // namespace unshard::kernels
