#pragma once
// Learning-rate (and momentum) schedules, as functions of the number of applied updates. Formulas: docs/schedules.md.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace unshard {

/// What a schedule says for one group after `updates` applied updates.
struct ScheduleValue {
  std::optional<double> lr, momentum;  ///< momentum: beta1 (with beta2 = second_beta); optimizers without betas keep theirs
  std::optional<double> second_beta;
};

class LrSchedule {
 public:
  virtual ~LrSchedule() = default;
  virtual std::string type() const = 0;
  /// \param updates  applied updates so far; 0 = before the first. \param group  index; \param base_lr the optimizer's lr at start.
  virtual ScheduleValue value(std::int64_t updates, int group, double base_lr) const = 0;
};

/// WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest. \throws ConfigError for an unknown type or parameter (nearest named),
/// a missing or impossible value.
std::unique_ptr<LrSchedule> make_lr_schedule(const std::string& type, const std::string& params_json, double base_lr, int groups);
bool is_known_lr_schedule(const std::string& type);

}  // namespace unshard
