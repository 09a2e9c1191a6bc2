// The batch triple: train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * world size.
#include <array>
#include <optional>

#include "core/config_internal.h"

namespace unshard::config {
namespace {

constexpr std::array<const char*, 3> kNames = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"};

struct Triple {
  std::optional<std::int64_t> train, micro, steps;  ///< what the user gave
  std::int64_t world;
  const std::string& source;

  std::string part(std::size_t name, const std::optional<std::int64_t>& value) const {
    return cat(kNames[name], " ", value ? cat(*value, " (", source, ")") : std::string("(not given)"));
  }

  [[noreturn]] void fail(std::string_view why, std::string_view fix) const {
    throw ConfigError(
        cat("[config] ", why,
            ".\n  train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * world size must hold with\n  ",
            part(0, train), " = ", part(1, micro), " * ", part(2, steps), " * world size ", world, " (data-parallel ranks)\n  Fix: ", fix));
  }

  void check_positive() const {
    const std::array values = {train, micro, steps};
    for (std::size_t i = 0; i < values.size(); ++i)
      if (values[i] && *values[i] < 1)
        fail(cat(kNames[i], " = ", *values[i], " isn't a positive number"), cat("set ", kNames[i], " to 1 or more, or remove it"));
  }

  /// a * b, or an error: no real run has 2^63 samples a step.
  std::int64_t product(std::int64_t a, std::int64_t b) const {
    std::int64_t result = 0;
    if (__builtin_mul_overflow(a, b, &result)) fail("the batch sizes are too large: their product overflows", "use smaller numbers");
    return result;
  }

  /// train / divisor when that is exact.
  std::int64_t divide_train(std::int64_t divisor, std::string_view divisor_text, std::string_view wanted) const {
    if (*train % divisor == 0) return *train / divisor;
    const std::int64_t below = *train / divisor * divisor, above = product(*train / divisor + 1, divisor);
    fail(cat("train_batch_size ", *train, " isn't divisible by ", divisor_text, " = ", divisor, ", so that ", wanted, " can't be derived"),
         cat("set train_batch_size to ", below > 0 ? cat(below, " or ") : std::string(), above, ", or change what it is divided by"));
  }
};

std::optional<std::int64_t> given(const Checked& checked, const char* name) {
  const Entry* entry = checked.find(name);
  return entry != nullptr ? std::optional(entry->value.get<std::int64_t>()) : std::nullopt;
}

}  // namespace

bool is_batch_key(std::string_view path) { return path == kNames[0] || path == kNames[1] || path == kNames[2]; }

std::string resolve_batch(Config& config, const Checked& checked, const ConfigContext& context) {
  if (context.world_size < 1) throw ConfigError(cat("[config] world size ", context.world_size, " isn't a positive number"));
  const Triple t{given(checked, kNames[0]), given(checked, kNames[1]), given(checked, kNames[2]), context.world_size, context.source};
  t.check_positive();
  BatchConfig& batch = config.batch;
  const auto world = t.world;
  if (!t.train) {
    batch.micro_batch_size = t.micro.value_or(1);
    batch.accumulation_steps = t.steps.value_or(1);
    batch.train_batch_size = t.product(t.product(batch.micro_batch_size, batch.accumulation_steps), world);
    batch.micro_batch_assumed = !t.micro;
    if (t.micro) return "";
    return cat("no batch size is configured: a micro batch of 1 sample per rank is assumed in the accounts (train_batch_size ",
               batch.train_batch_size, " = 1 * ", batch.accumulation_steps, " * ", world,
               " ranks); set train_micro_batch_size_per_gpu to the real one");
  }
  batch.train_batch_size = *t.train;
  if (t.micro && t.steps) {
    const auto product = t.product(t.product(*t.micro, *t.steps), world);
    if (product != *t.train)
      t.fail(cat("the batch sizes contradict each other: ", *t.train, " != ", *t.micro, " * ", *t.steps, " * ", world, " = ", product),
             cat("set train_batch_size to ", product, ", or remove one of the three: it is derived from the others"));
    batch.micro_batch_size = *t.micro;
    batch.accumulation_steps = *t.steps;
  } else if (t.micro) {
    batch.micro_batch_size = *t.micro;
    batch.accumulation_steps = t.divide_train(t.product(*t.micro, world), "train_micro_batch_size_per_gpu * world size", kNames[2]);
  } else {
    batch.accumulation_steps = t.steps.value_or(1);
    batch.micro_batch_size = t.divide_train(t.product(batch.accumulation_steps, world),
                                            t.steps ? "gradient_accumulation_steps * world size" : "the world size", kNames[1]);
  }
  return "";
}

}  // namespace unshard::config
