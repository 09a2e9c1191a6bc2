// Rules between keys.
#include <array>

#include "core/config_internal.h"

namespace unshard::config {
namespace {

void check_precision(const Config& config, const std::string& source) {
  if (config.fp16.enabled && config.bf16.enabled)
    throw ConfigError(cat("[config] fp16.enabled = true and bf16.enabled = true (", source,
                          "): weights have one dtype; set one of them to false (bf16 needs no loss scale and is the safer choice)"));
}

void check_offload(const Checked& checked, const std::string& source) {
  for (const char* which : {"offload_optimizer", "offload_param"}) {
    const std::string path = cat("zero_optimization.", which, ".device");
    const Entry* device = checked.find(path);
    if (device != nullptr && device->value == "nvme")
      throw ConfigError(
          cat("[config] known, not built yet: ", path, " = \"nvme\" (", source, "); remove it or set it to \"cpu\" or \"none\""));
  }
}

void check_reduction(const Config& config, const std::string& source) {
  if (!config.allreduce_mean && config.zero.stage == 3)
    throw ConfigError(cat("[config] gradient_allreduce_op = \"sum\" (", source, ") isn't allowed at zero_optimization.stage = 3; ",
                          "use \"mean\", or a lower stage"));
}

/// The old switches and the sections that replaced them.
void check_old_offload(const Checked& checked, const std::string& source) {
  constexpr std::array<std::array<const char*, 2>, 4> kPairs = {{{"cpu_offload", "offload_optimizer.device"},
                                                                 {"cpu_offload_param", "offload_param.device"},
                                                                 {"cpu_offload_use_pin_memory", "offload_optimizer.pin_memory"},
                                                                 {"cpu_offload_use_pin_memory", "offload_param.pin_memory"}}};
  for (const auto& [old_name, new_name] : kPairs) {
    const std::string old_path = cat("zero_optimization.", old_name), new_path = cat("zero_optimization.", new_name);
    if (checked.find(old_path) != nullptr && checked.find(new_path) != nullptr)
      throw ConfigError(
          cat("[config] ", old_path, " is the old form of ", new_path, " and both are given (", source, "); keep ", new_path));
  }
}

}  // namespace

void check_rules(const Config& config, const Checked& checked, const std::string& source) {
  check_precision(config, source);
  check_old_offload(checked, source);
  check_offload(checked, source);
  check_reduction(config, source);
}

}  // namespace unshard::config
