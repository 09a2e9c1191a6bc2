#include "unshard/engine/launch.h"

#include "comm/launch_env.h"
#include "unshard/comm/communicator.h"
#include "unshard/comm/run_record.h"

namespace unshard {

Launch launch(const std::string& config_file) {
  const auto env = comm::read_launch_env(comm::process_env);
  Launch result;
  result.config = Config::from_file(config_file, {.world_size = env.world_size, .deepspeed_defaults = false, .source = config_file});
  const auto& settings = result.config.unshard;
  CommOptions options;
  options.share_memory = settings.share_memory;
  options.host_name = settings.host;
  options.timeout = std::chrono::duration<double>(settings.timeout_s);
  options.collective_check = std::chrono::duration<double>(settings.collective_check_s);
  RunRecordOptions recording;
  recording.rank = env.rank;
  recording.world_size = env.world_size;
  recording.directory = settings.run_dir;
  options.record = RunRecord::from_environment(recording);
  result.comm = init_process_group(options);
  return result;
}

}  // namespace unshard
