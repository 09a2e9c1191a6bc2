#pragma once
// Loss scaling for fp16, static or dynamic, with DeepSpeed's rules.
#include <cstdint>

namespace unshard {

struct LossScalerOptions {
  double static_scale = 0;  ///< > 0: never changes
  int initial_scale_power = 16, window = 1000, hysteresis = 2;
  bool consecutive_hysteresis = false;
  double min_scale = 1;
};

class LossScaler {
 public:
  explicit LossScaler(const LossScalerOptions& options);
  double scale() const { return scale_; }
  bool dynamic() const { return options_.static_scale <= 0; }
  /// Once a step with the flag all ranks agreed on. \throws std::runtime_error an overflow while the scale is at its minimum.
  void update(bool overflow);
  /// For save and load.
  struct State {
    double scale;
    std::int64_t iteration, last_overflow;
    int hysteresis_left;
  };
  State state() const;
  void set_state(const State& state);

 private:
  LossScalerOptions options_;
  double scale_;
  std::int64_t iteration_ = 0, last_overflow_ = -1;
  int hysteresis_left_;
};

}  // namespace unshard
