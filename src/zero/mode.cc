#include "zero/mode.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

namespace unshard::zero {

bool touches_for_gradients() { return at::GradMode::is_enabled() || torch::autograd::get_current_graph_task_id() >= 0; }

Mode mode_of_touch(Forward forward, bool step_begun) {
  if (forward == Forward::without_gradients) return Mode::eval;
  if (forward == Forward::with_gradients || step_begun || touches_for_gradients()) return Mode::train;
  return Mode::generate;
}

}  // namespace unshard::zero
