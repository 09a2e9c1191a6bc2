#include "comm/launch_env.h"

#include <array>
#include <charconv>
#include <cstdlib>
#include <vector>

#include "unshard/core/error.h"

namespace unshard::comm {

namespace {

struct Names {
  const char *rank, *world_size;
};
constexpr std::array<Names, 4> kLaunchers{
    {{"RANK", "WORLD_SIZE"}, {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}, {"PMI_RANK", "PMI_SIZE"}, {"SLURM_PROCID", "SLURM_NTASKS"}}};

int parse_int(const char* name, const std::string& text, int lowest, int highest) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  require(error == std::errc() && end == text.data() + text.size() && value >= lowest && value <= highest, "[comm.init_process_group] ",
          name, "='", text, "'; wanted a whole number from ", lowest, " to ", highest);
  return value;
}

std::optional<Names> launcher(const GetEnv& get) {
  for (const Names& names : kLaunchers) {
    const bool has_rank = get(names.rank).has_value(), has_size = get(names.world_size).has_value();
    if (has_rank && has_size) return names;
    // RANK without WORLD_SIZE, or the reverse, is a mistake. The other launchers' names come in pairs or belong to something else.
    require(names.rank != kLaunchers[0].rank || has_rank == has_size, "[comm.init_process_group] ",
            has_rank ? names.rank : names.world_size, " is set but ", has_rank ? names.world_size : names.rank,
            " is not; set both, or neither for a world of one");
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> process_env(const char* name) {
  const char* value = std::getenv(name);
  return value && *value ? std::optional<std::string>(value) : std::nullopt;
}

LaunchEnv read_launch_env(const GetEnv& get) {
  LaunchEnv env;
  const auto names = launcher(get);
  if (!names) return env;
  env.world_size = parse_int(names->world_size, *get(names->world_size), 1, 1 << 20);
  env.rank = parse_int(names->rank, *get(names->rank), 0, (1 << 20) - 1);
  require(env.rank < env.world_size, "[comm.init_process_group] ", names->rank, "=", env.rank, " with ", names->world_size, "=",
          env.world_size, "; ranks go from 0 to ", env.world_size - 1);
  if (env.world_size == 1) return env;
  for (const char* needed : {"MASTER_ADDR", "MASTER_PORT"})
    require(get(needed).has_value(), "[comm.init_process_group] ", needed, " is not set; ", names->world_size, "=", env.world_size,
            " ranks need rank 0's address and a free port in MASTER_ADDR and MASTER_PORT (torchrun and `unshard run` set them)");
  env.address = *get("MASTER_ADDR");
  env.port = static_cast<std::uint16_t>(parse_int("MASTER_PORT", *get("MASTER_PORT"), 1, 65535));
  env.store_exists = get("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True";
  env.store_prefix = "attempt/" + get("TORCHELASTIC_RESTART_COUNT").value_or("0");
  return env;
}

}  // namespace unshard::comm
