#pragma once
// What each instruction set supplies for the update: one pass over a range, on one thread. Plain types only (see the note in core/vec.h).
#include <cstdint>

#include "core/flat_math_kernels.h"

namespace unshard::kernels {

enum class RuleKind : int { adam = 0, sgd = 1, sgd_momentum = 2, adagrad = 3, lion = 4 };

/// The constants of one update formula, computed in double on the host and rounded once.
struct Rule {
  RuleKind kind;
  float grad_scale;    ///< g = grad * grad_scale
  float l2;            ///< g += l2 * p (0: none)
  float keep;          ///< p *= keep, decoupled decay: 1 - lr * weight_decay
  float lr;            ///< step size; for Adam lr / bias_correction1, for Adagrad with its decay
  float beta1, rest1;  ///< first moment (or momentum) and its complement (1 - beta1, or 1 - dampening)
  float beta2, rest2;  ///< second moment, 1 - beta2
  float inverse_root;  ///< Adam: 1 / sqrt(bias_correction2)
  float eps;
  bool nesterov, first_step;
};

struct UpdateArrays {
  float* master;  ///< updated
  Flat param;     ///< 16-bit copy of master, or data == nullptr
  Flat grad;
  float* first;   ///< exp_avg, momentum_buffer, sum; null where the rule has none
  float* second;  ///< exp_avg_sq
};

struct UpdateKernels {
  void (*update)(std::int64_t begin, std::int64_t end, const UpdateArrays& arrays, const Rule& rule);
};

const UpdateKernels& update_kernels_portable();
const UpdateKernels& update_kernels_avx2();
const UpdateKernels& update_kernels_avx512();

}  // namespace unshard::kernels
