#pragma once
// A program's start in one call.
#include <memory>
#include <string>

#include "unshard/core/config.h"

namespace unshard {

class Communicator;

struct Launch {
  Config config;
  std::shared_ptr<Communicator> comm;
};

/// Read the JSON for the number of ranks that the launcher started (environment, see init_process_group), then join them with the options
/// that its section "unshard" gives (share_memory, timeout_s, collective_check_s). Collective.
/// Use Config::from_file and init_process_group instead to choose the options, or the group, in the program.
/// \throws ConfigError, std::invalid_argument (a missing or malformed variable), CommError.
Launch launch(const std::string& config_file);

}  // namespace unshard
