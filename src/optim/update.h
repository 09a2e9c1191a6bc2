#pragma once
// Update rules from hyperparameters, and the pass that applies them to many arrays at once.
#include <vector>

#include "optim/update_kernels.h"
#include "unshard/core/flat_math.h"
#include "unshard/optim/kernels.h"

namespace unshard::kernels {

Rule adam_rule(const AdamArgs& args);
Rule sgd_rule(double lr, double momentum, double dampening, double weight_decay, bool nesterov, bool first_step, double grad_scale);
/// \param lr  with its decay already applied.
Rule adagrad_rule(double lr, double eps, double weight_decay, double grad_scale);
Rule lion_rule(double lr, double beta1, double beta2, double weight_decay, double grad_scale);

/// One array and what to do with it.
struct Update {
  std::int64_t n;
  UpdateArrays arrays;
  Rule rule;
};

/// \throws std::invalid_argument  a dtype that the kernels don't read.
UpdateArrays update_arrays(const char* where, float* master, Array param, Array grad, float* first, float* second);

/// Apply all, sharing the elements of all of them out to the threads: one large array and a thousand small ones are both spread evenly.
void run_updates(const Update* updates, std::size_t count);

}  // namespace unshard::kernels
