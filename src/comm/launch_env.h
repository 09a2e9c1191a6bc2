#pragma once
// What launchers tell a rank through the environment.
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace unshard::comm {

struct LaunchEnv {
  int rank = 0, world_size = 1;
  std::string address;  ///< empty: a world of one without a store
  std::uint16_t port = 0;
  bool store_exists = false;  ///< torchrun's agent serves the store
  std::string store_prefix;   ///< a restarted job must not see its former keys
};

using GetEnv = std::function<std::optional<std::string>(const char*)>;

/// RANK, WORLD_SIZE (also Open MPI's, MPICH's and Slurm's names), MASTER_ADDR, MASTER_PORT.
/// \throws std::invalid_argument naming the missing or malformed variable.
LaunchEnv read_launch_env(const GetEnv& get);

std::optional<std::string> process_env(const char* name);

}  // namespace unshard::comm
