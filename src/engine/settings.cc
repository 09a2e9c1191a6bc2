#include "settings.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "unshard/core/error.h"

namespace unshard {
namespace {

// Paths of a host's own, and how a rank reports and waits. Memory is shared or not by the group, which agrees on it when it starts.
constexpr std::array<std::string_view, 10> kOwn{"steps_per_print",  "wall_clock_breakdown",      "memory_breakdown",  "dump_state",
                                                "unshard.host",     "unshard.share_memory",      "unshard.timeout_s", "unshard.run_dir",
                                                "unshard.timeline", "unshard.collective_check_s"};
constexpr std::array<std::string_view, 6> kOwnSections{"tensorboard.", "csv_monitor.", "wandb.", "comet.", "flops_profiler.", "aio."};

bool may_differ(const std::string& key) {
  return std::find(kOwn.begin(), kOwn.end(), key) != kOwn.end() || key.ends_with("nvme_path") ||
         std::any_of(kOwnSections.begin(), kOwnSections.end(), [&](std::string_view section) { return key.starts_with(section); });
}

std::string group_line(const ParamGroup& group, std::size_t number) {
  const auto& o = group.options;
  return cat("optimizer's group ", number, " = ", group.names.size(), " parameters, lr ", o.lr, ", betas ", o.beta1, " ", o.beta2, ", eps ",
             o.eps, ", weight decay ", o.weight_decay, ", momentum ", o.momentum, ", dampening ", o.dampening, ", nesterov ", o.nesterov,
             ", lr decay ", o.lr_decay, ", initial accumulator ", o.initial_accumulator, ", bias correction ", o.bias_correction,
             ", maximize ", o.maximize, ", coefficients ", o.min_coeff, " to ", o.max_coeff, ", eps inside the root ", o.eps_inside_sqrt);
}

}  // namespace

std::vector<std::string> settings_lines(const Config& config, const EngineOptions& options) {
  std::vector<std::string> lines;
  for (const auto& row : config.table()) {
    if (!may_differ(row.key)) lines.push_back(cat(row.key, " = ", row.value));
  }
  lines.push_back(cat("unshard.timeline = ", config.unshard.timeline.empty() ? "off" : "on"));
  lines.insert(lines.end(), options.alike.begin(), options.alike.end());
  for (std::size_t number = 0; number < options.groups.size(); ++number) lines.push_back(group_line(options.groups[number], number));
  return lines;
}

}  // namespace unshard
