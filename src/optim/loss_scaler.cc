#include "unshard/optim/loss_scaler.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "unshard/core/error.h"

namespace unshard {

LossScaler::LossScaler(const LossScalerOptions& options)
    : options_(options),
      scale_(options.static_scale > 0 ? options.static_scale : std::ldexp(1.0, options.initial_scale_power)),
      hysteresis_left_(options.hysteresis) {
  require(std::isfinite(options.static_scale), "[optim.LossScaler] loss_scale ", options.static_scale, "; wanted a finite number");
  if (!dynamic()) return;
  require(options.initial_scale_power >= 0 && options.initial_scale_power < 1024, "[optim.LossScaler] initial_scale_power ",
          options.initial_scale_power, "; wanted 0 to 1023 (the scale starts at 2 to this power)");
  require(options.window >= 1, "[optim.LossScaler] loss_scale_window ", options.window, "; wanted at least 1 step");
  require(options.hysteresis >= 1, "[optim.LossScaler] hysteresis ", options.hysteresis, "; wanted at least 1");
  require(options.min_scale > 0, "[optim.LossScaler] min_loss_scale ", options.min_scale, "; wanted a positive number");
}

void LossScaler::update(bool overflow) {
  if (!dynamic()) return;
  if (overflow) {
    if (hysteresis_left_ > 1) {
      --hysteresis_left_;
    } else if (scale_ <= options_.min_scale) {
      throw std::runtime_error(cat("[optim.LossScaler] gradients overflowed at step ", iteration_,
                                   " with the loss scale already at its minimum ", options_.min_scale,
                                   ": the loss or the model diverges in fp16; use bf16, a lower learning rate, or a lower "
                                   "fp16.min_loss_scale"));
    } else {
      scale_ = std::max(scale_ / 2, options_.min_scale);
    }
    last_overflow_ = iteration_;
  } else {
    if (options_.consecutive_hysteresis) hysteresis_left_ = options_.hysteresis;
    const std::int64_t stable = iteration_ - last_overflow_ - 1;
    if (stable > 0 && stable % options_.window == 0) {
      hysteresis_left_ = options_.hysteresis;
      scale_ *= 2;
    }
  }
  ++iteration_;
}

LossScaler::State LossScaler::state() const { return {scale_, iteration_, last_overflow_, hysteresis_left_}; }

void LossScaler::set_state(const State& state) {
  require(state.scale > 0 && state.iteration >= 0 && state.hysteresis_left >= 0, "[optim.LossScaler] state with scale ", state.scale,
          ", iteration ", state.iteration, ", hysteresis ", state.hysteresis_left, " is not one that this class saved");
  scale_ = dynamic() ? state.scale : options_.static_scale;
  iteration_ = state.iteration;
  last_overflow_ = state.last_overflow;
  hysteresis_left_ = state.hysteresis_left;
}

}  // namespace unshard
