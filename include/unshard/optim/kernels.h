#pragma once
// Fused CPU passes over flat memory. Vectorised (AVX-512, AVX2, portable, chosen at run time), split over at::get_num_threads() threads.
// An element's result never depends on its position, alignment, the piece it is in or the number of threads: stages agree bit for bit.
// The same bits come from every instruction set (all use fused multiply-add where the formula says so; tails use the same operations).
#include <c10/core/ScalarType.h>

#include <cstdint>

namespace unshard::kernels {

/// Memory of one flat array; dtype fp32, bf16 or fp16.
struct Array {
  void* data = nullptr;
  c10::ScalarType dtype = c10::ScalarType::Float;
};

struct AdamArgs {
  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled, bias_correction;
  std::int64_t step;              ///< from 1
  double grad_scale;              ///< g = grad * grad_scale
};

/// master: fp32 weights, updated. param: null when the weights are fp32 themselves (master is the parameter), else 16-bit copy, rewritten
/// by rounding to nearest even; where the 16-bit value differs from the cast of master on entry (the user edited it), it replaces master first.
void adam(std::int64_t n, float* master, Array param, Array grad, float* exp_avg, float* exp_avg_sq, const AdamArgs& args);
void sgd(std::int64_t n, float* master, Array param, Array grad, float* momentum_buffer, double lr, double momentum, double dampening,
         double weight_decay, bool nesterov, bool first_step, double grad_scale);
void adagrad(std::int64_t n, float* master, Array param, Array grad, float* sum, double lr, double eps, double weight_decay, double grad_scale);
void lion(std::int64_t n, float* master, Array param, Array grad, float* exp_avg, double lr, double beta1, double beta2, double weight_decay,
          double grad_scale);

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
