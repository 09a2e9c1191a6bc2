#pragma once
// Fused update passes over flat memory, in the manner of core/flat_math.h: vectorised, split over at::get_num_threads() threads.
// An element's result never depends on its position, alignment, the piece it is in or the number of threads: stages agree bit for bit.
// The same bits come from every instruction set (all use fused multiply-add where the formula says so; tails use the same operations).
#include <cstdint>

#include "unshard/core/flat_math.h"

namespace unshard::kernels {

struct AdamArgs {
  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled, bias_correction;
  std::int64_t step;  ///< from 1
  double grad_scale;  ///< g = grad * grad_scale
};

/// master: fp32 weights, updated. param: null when the weights are fp32 themselves (master is the parameter), else 16-bit copy, rewritten
/// by rounding to nearest even; where the 16-bit value differs from the cast of master on entry (the user edited it), it replaces master
/// first.
void adam(std::int64_t n, float* master, Array param, Array grad, float* exp_avg, float* exp_avg_sq, const AdamArgs& args);
void sgd(std::int64_t n, float* master, Array param, Array grad, float* momentum_buffer, double lr, double momentum, double dampening,
         double weight_decay, bool nesterov, bool first_step, double grad_scale);
void adagrad(std::int64_t n, float* master, Array param, Array grad, float* sum, double lr, double eps, double weight_decay,
             double grad_scale);
void lion(std::int64_t n, float* master, Array param, Array grad, float* exp_avg, double lr, double beta1, double beta2,
          double weight_decay, double grad_scale);

}  // namespace unshard::kernels
