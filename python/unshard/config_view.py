"""A resolved configuration as an object to read, for scripts that ask for one without an engine."""
import types

import torch.distributed as dist

from unshard.config import load_config
from unshard.monitor.settings import MonitorSettings


class ConfigView:
    """`config`: dict, path or base64 text. Batch sizes are resolved for `world_size` ranks (default: as many as there are, or `mpu`'s).

    `zero_config`, `fp16`, `bfloat16`, `optimizer_params`, ...: what the JSON and the defaults say; `section(name)`: any section as given.
    """

    def __init__(self, config, mpu=None, mesh_device=None, world_size=None, deepspeed_defaults=True):
        if world_size is None:
            world_size = mpu.get_data_parallel_world_size() if mpu is not None else dist.get_world_size() if dist.is_initialized() else 1
        self._config, self._param_dict = load_config(config, world_size, deepspeed_defaults)
        self.world_size, self.global_rank, self.mpu = world_size, dist.get_rank() if dist.is_initialized() else 0, mpu
        resolved, given = self._config, self._param_dict
        self.train_batch_size = resolved.batch.train_batch_size
        self.train_micro_batch_size_per_gpu = resolved.batch.micro_batch_size
        self.gradient_accumulation_steps = resolved.batch.accumulation_steps
        self.zero_config, self.zero_optimization_stage = resolved.zero, resolved.zero.stage
        self.zero_enabled = resolved.zero.stage > 0
        self.float16_config, self.bfloat16_config = resolved.fp16, resolved.bf16
        self.float16_enabled, self.bfloat16_enabled = resolved.fp16.enabled, resolved.bf16.enabled
        self.gradient_clipping, self.steps_per_print = resolved.gradient_clipping, resolved.steps_per_print
        self.prescale_gradients, self.gradient_predivide_factor = resolved.prescale_gradients, resolved.gradient_predivide_factor
        self.wall_clock_breakdown, self.memory_breakdown = resolved.wall_clock_breakdown, resolved.memory_breakdown
        self.dump_state, self.dataloader_drop_last = resolved.dump_state, resolved.dataloader_drop_last
        self.communication_data_type, self.grad_accum_dtype = resolved.communication_dtype, resolved.grad_accum_dtype
        self.optimizer_name = resolved.optimizer.type.lower() or None
        self.optimizer_params = given.get("optimizer", {}).get("params")
        self.scheduler_name, self.scheduler_params = resolved.scheduler.type or None, given.get("scheduler", {}).get("params")
        self.monitor_config = MonitorSettings.of(given)
        self.comms_logger = types.SimpleNamespace(**self.section("comms_logger"))
        self.comms_logger_enabled = bool(self.section("comms_logger").get("enabled"))
        self.activation_checkpointing_config = types.SimpleNamespace(**self.section("activation_checkpointing"))

    def section(self, name):
        """A section as given; {} without."""
        return dict(self._param_dict.get(name) or {})

    def table(self):
        """[(key, value, where it is from)] of every resolved key."""
        return self._config.table()

    def print(self, name="DeepSpeedConfig"):
        """Print every resolved key."""
        print("\n".join([f"{name}:", *(f"  {key} = {value} ({origin})" for key, value, origin in self.table())]))

    def print_user_config(self):
        """Print the JSON with the batch sizes resolved."""
        print(self._config.to_json())
