#pragma once
// What an engine's settings are, in lines that all ranks must have alike.
#include <string>
#include <vector>

#include "unshard/core/config.h"
#include "unshard/engine/engine.h"

namespace unshard {

/// "key = value" of the whole resolved config, but for what only decides how a rank reports and waits; then `options.alike` and the
/// parameter groups' hyperparameters.
std::vector<std::string> settings_lines(const Config& config, const EngineOptions& options);

}  // namespace unshard
