#include "unshard/optim/lr_schedule.h"

#include <algorithm>
#include <cctype>
#include <cmath>

#include "optim/params_reader.h"
#include "unshard/core/error.h"

namespace unshard {
namespace {

const std::vector<std::string> kKnown{"WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"};

double at(const std::vector<double>& values, int group) { return values.at(static_cast<std::size_t>(group)); }

/// The rise from 0 to 1 over the first updates. `k` is the number of updates before the one that the value is for; k < steps.
struct Warmup {
  std::int64_t steps = 1000;
  bool logarithmic = true;

  explicit Warmup(ParamsReader& reader) {
    steps = reader.integer("warmup_num_steps").value_or(1000);
    reader.check(steps > 0, "warmup_num_steps", "wanted at least 1 (1 counts as 2)");
    steps = std::max<std::int64_t>(steps, 2);
    const std::string type = reader.text("warmup_type").value_or("log");
    reader.check(type == "log" || type == "linear", "warmup_type", "accepted: \"log\", \"linear\"");
    logarithmic = type == "log";
  }
  double part(std::int64_t k) const {
    const auto position = static_cast<double>(k), length = static_cast<double>(steps);
    return logarithmic ? std::log(position + 1) / std::log(length) : position / length;
  }
};

std::int64_t read_total_steps(ParamsReader& reader) {
  const auto total = reader.integer("total_num_steps");
  if (!total) reader.fail("total_num_steps", "it is required: the number of updates of the whole run");
  reader.check(*total > 0, "total_num_steps", "wanted at least 1 update");
  return *total;
}

/// Counts updates from `last_batch_iteration`, the index of the update that a run starts after (-1: from the start).
class CountedSchedule : public LrSchedule {
 public:
  CountedSchedule(std::string type, ParamsReader& reader) : type_(std::move(type)) {
    first_ = reader.integer("last_batch_iteration").value_or(-1) + 1;
    reader.check(first_ >= 0, "last_batch_iteration", "wanted at least -1");
  }
  std::string type() const override { return type_; }
  ScheduleValue value(std::int64_t updates, int group, double base_lr) const override {
    if (updates == 0 && first_ > 0) return {};  // a run that goes on: its first update is made with what the optimizer has
    return after(updates + first_, group, base_lr);
  }

 protected:
  virtual ScheduleValue after(std::int64_t updates, int group, double base_lr) const = 0;
  static ScheduleValue only_lr(double lr) {
    ScheduleValue value;
    value.lr = lr;
    return value;
  }

 private:
  std::string type_;
  std::int64_t first_ = 0;
};

/// WarmupLR and, with a total, WarmupDecayLR.
class WarmupSchedule : public CountedSchedule {
 public:
  WarmupSchedule(const std::string& type, ParamsReader& reader, int groups, bool decays) : CountedSchedule(type, reader), warmup_(reader) {
    min_ = reader.per_group("warmup_min_lr", groups);
    if (min_.empty()) min_.assign(static_cast<std::size_t>(groups), 0);
    max_ = reader.per_group("warmup_max_lr", groups);
    if (decays) {
      total_ = read_total_steps(reader);
      if (max_.empty()) max_.assign(static_cast<std::size_t>(groups), 1e-3);
    }
  }

 protected:
  ScheduleValue after(std::int64_t updates, int group, double base_lr) const override {
    const double low = at(min_, group), high = max_.empty() ? base_lr : at(max_, group);
    if (updates == 0) return only_lr(low);
    return only_lr(low + (high - low) * part(updates - 1));
  }

 private:
  double part(std::int64_t k) const {
    if (k < warmup_.steps) return warmup_.part(k);
    if (!total_) return 1;
    return std::max(0.0, static_cast<double>(*total_ - k) / std::max(1.0, static_cast<double>(*total_ - warmup_.steps)));
  }
  Warmup warmup_;
  std::vector<double> min_, max_;  // max_ empty: the optimizer's own lr
  std::optional<std::int64_t> total_;
};

class WarmupCosineSchedule : public CountedSchedule {
 public:
  WarmupCosineSchedule(const std::string& type, ParamsReader& reader) : CountedSchedule(type, reader), warmup_(reader) {
    total_ = read_total_steps(reader);
    start_ = reader.number("warmup_min_ratio", 0);
    end_ = reader.number("cos_min_ratio", 1e-4);
    reader.check(start_ >= 0 && start_ <= 1, "warmup_min_ratio", "wanted a number in [0, 1]");
    reader.check(end_ >= 0 && end_ <= 1, "cos_min_ratio", "wanted a number in [0, 1]");
  }

 protected:
  ScheduleValue after(std::int64_t updates, int, double base_lr) const override {
    return only_lr(updates == 0 ? 0 : base_lr * ratio(updates - 1));
  }

 private:
  double ratio(std::int64_t k) const {
    if (k < warmup_.steps) return start_ + (1 - start_) * warmup_.part(k);
    const double length = std::max(1.0, static_cast<double>(total_ - warmup_.steps));
    const double progress = std::min(1.0, static_cast<double>(k - warmup_.steps + 1) / length);
    return end_ + (1 - end_) * (1 + std::cos(M_PI * progress)) / 2;
  }
  Warmup warmup_;
  std::int64_t total_ = 0;
  double start_ = 0, end_ = 0;
};

class OneCycleSchedule : public CountedSchedule {
 public:
  OneCycleSchedule(const std::string& type, ParamsReader& reader, int groups) : CountedSchedule(type, reader) {
    min_ = required(reader, "cycle_min_lr", groups);
    max_ = required(reader, "cycle_max_lr", groups);
    first_size_ = reader.number("cycle_first_step_size", 2000);
    const double second_size = reader.number("cycle_second_step_size", first_size_);
    reader.check(first_size_ > 0, "cycle_first_step_size", "wanted a number > 0");
    reader.check(second_size >= 0, "cycle_second_step_size", "wanted a number >= 0");
    total_size_ = first_size_ + second_size;
    first_stairs_ = reader.integer("cycle_first_stair_count").value_or(0);
    second_stairs_ = reader.integer("cycle_second_stair_count").value_or(first_stairs_);
    reader.check(first_stairs_ >= 0, "cycle_first_stair_count", "wanted a number >= 0 (0: a straight line)");
    reader.check(second_stairs_ >= 0, "cycle_second_stair_count", "wanted a number >= 0 (0: a straight line)");
    decay_size_ = reader.number("decay_step_size", 0);
    reader.check(decay_size_ >= 0, "decay_step_size", "wanted a number >= 0 (0: no decay after the cycle)");
    lr_rate_ = reader.number("decay_lr_rate", 0);
    cycle_momentum_ = reader.flag("cycle_momentum", true);
    min_momentum_ = reader.number("cycle_min_mom", 0.8);
    max_momentum_ = reader.number("cycle_max_mom", 0.9);
    momentum_rate_ = reader.number("decay_mom_rate", 0);
  }

 protected:
  ScheduleValue after(std::int64_t updates, int group, double) const override {
    const double low = at(min_, group), high = at(max_, group), position = static_cast<double>(updates);
    double lr = low, momentum = min_momentum_;  // before the first update both rest at their minimum
    if (updates > 0 && position <= total_size_) {
      const double height = height_at(position);
      lr = low + (high - low) * height;
      momentum = max_momentum_ - (max_momentum_ - min_momentum_) * height;
    } else if (updates > 0) {
      const double intervals = decay_size_ > 0 ? (position - total_size_) / decay_size_ : 0;
      lr = low / (1 + lr_rate_ * intervals);
      momentum = max_momentum_ * (1 + momentum_rate_ * intervals);
    }
    ScheduleValue value = only_lr(lr);
    if (cycle_momentum_) {
      value.momentum = momentum;
      value.second_beta = 0.99;
    }
    return value;
  }

 private:
  static std::vector<double> required(ParamsReader& reader, const char* key, int groups) {
    auto values = reader.per_group(key, groups);
    if (values.empty()) reader.fail(key, "it is required: the learning rate at one end of the cycle");
    return values;
  }
  /// 0 at both ends of the cycle, 1 where the first half ends; in stairs where they are asked for.
  double height_at(double position) const {
    if (position >= total_size_) return 0;
    const bool rises = position <= first_size_;
    if (const auto stairs = static_cast<double>(rises ? first_stairs_ : second_stairs_); stairs > 0) {
      const double way = rises ? position * stairs / first_size_ : (total_size_ - position) * stairs / (total_size_ - first_size_);
      return std::floor(way) / stairs;
    }
    const double part = position / total_size_, peak = first_size_ / total_size_;
    return rises ? part / peak : (part - 1) / (peak - 1);
  }
  std::vector<double> min_, max_;
  double first_size_ = 0, total_size_ = 0, decay_size_ = 0, lr_rate_ = 0, momentum_rate_ = 0, min_momentum_ = 0, max_momentum_ = 0;
  std::int64_t first_stairs_ = 0, second_stairs_ = 0;
  bool cycle_momentum_ = true;
};

class RangeTestSchedule : public CountedSchedule {
 public:
  RangeTestSchedule(const std::string& type, ParamsReader& reader, int groups) : CountedSchedule(type, reader) {
    min_ = reader.per_group("lr_range_test_min_lr", groups);
    if (min_.empty()) min_.assign(static_cast<std::size_t>(groups), 1e-3);
    size_ = reader.number("lr_range_test_step_size", 2000);
    reader.check(size_ > 0, "lr_range_test_step_size", "wanted a number > 0");
    rate_ = reader.number("lr_range_test_step_rate", 1);
    staircase_ = reader.flag("lr_range_test_staircase", false);
  }

 protected:
  ScheduleValue after(std::int64_t updates, int group, double) const override {
    const double intervals = static_cast<double>(updates) / size_;
    return only_lr(at(min_, group) * (1 + rate_ * (staircase_ ? std::floor(intervals) : intervals)));
  }

 private:
  std::vector<double> min_;
  double size_ = 0, rate_ = 0;
  bool staircase_ = false;
};

/// The known name that equals `type` but for case, or "".
std::string canonical_name(const std::string& type) {
  const auto same = [](char a, char b) {
    return std::tolower(static_cast<unsigned char>(a)) == std::tolower(static_cast<unsigned char>(b));
  };
  for (const auto& name : kKnown) {
    if (std::equal(name.begin(), name.end(), type.begin(), type.end(), same)) return name;
  }
  return {};
}

std::unique_ptr<LrSchedule> make(const std::string& type, ParamsReader& reader, int groups) {
  if (type == "WarmupLR") return std::make_unique<WarmupSchedule>(type, reader, groups, false);
  if (type == "WarmupDecayLR") return std::make_unique<WarmupSchedule>(type, reader, groups, true);
  if (type == "WarmupCosineLR") return std::make_unique<WarmupCosineSchedule>(type, reader);
  if (type == "OneCycle") return std::make_unique<OneCycleSchedule>(type, reader, groups);
  return std::make_unique<RangeTestSchedule>(type, reader, groups);
}

}  // namespace

bool is_known_lr_schedule(const std::string& type) { return !canonical_name(type).empty(); }

std::unique_ptr<LrSchedule> make_lr_schedule(const std::string& type, const std::string& params_json, double base_lr, int groups) {
  const std::string name = canonical_name(type);
  if (name.empty()) {
    const std::string near = nearest_name(type, kKnown);
    throw ConfigError(cat("scheduler.type \"", type, "\" is not built in", near.empty() ? "" : "; did you mean \"" + near + "\"?",
                          " Built in: WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest; any other can be passed as a client "
                          "scheduler"));
  }
  require(groups >= 1, "[optim.make_lr_schedule] ", groups, " parameter groups; wanted at least 1");
  require(std::isfinite(base_lr), "[optim.make_lr_schedule] base_lr ", base_lr, " is not finite");
  ParamsReader reader("scheduler.params of " + name, params_json);
  auto schedule = make(name, reader, groups);
  reader.finish();
  return schedule;
}

}  // namespace unshard
