"""The engine's counters and getters (methods, as scripts call them)."""
import torch


class EngineSettings:
    """Mixed into Engine: what was configured, what was counted."""

    _micro_steps_loaded = 0         # of another run, which DeepSpeed's engine doesn't count

    # Steps to now, skipped ones among them; samples over all ranks; micro-batches of this rank; skipped steps.
    global_steps = property(lambda self: self._core.global_steps)
    global_samples = property(lambda self: self._core.global_samples)
    micro_steps = property(lambda self: self._core.micro_steps - self._micro_steps_loaded)
    skipped_steps = property(lambda self: self._core.skipped_steps)

    def train_batch_size(self):
        """Samples per update, over all ranks."""
        return self._settings["train_batch"]

    def train_micro_batch_size_per_gpu(self):
        """Samples per forward of one rank."""
        return self._settings["micro_batch"]

    def gradient_accumulation_steps(self):
        """Micro-batches per update."""
        return self._settings["gas"]

    def get_batch_info(self):
        """(train_batch_size, micro batch size, accumulation steps)"""
        return self._settings["train_batch"], self._settings["micro_batch"], self._settings["gas"]

    def set_train_batch_size(self, train_batch_size):
        """Change the accumulation steps so that an update sees this many samples."""
        _check_count("set_train_batch_size", train_batch_size)
        per_step = self._settings["micro_batch"] * self.dp_world_size
        if train_batch_size < per_step or train_batch_size % per_step:
            raise ValueError(f"[engine.set_train_batch_size] {train_batch_size} isn't a multiple of micro batch x ranks = {per_step}")
        self._core.set_accumulation_steps(train_batch_size // per_step)
        self._settings.update(gas=train_batch_size // per_step, train_batch=train_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size):
        """Change the micro batch size; accumulation stays, so an update sees more samples."""
        _check_count("set_train_micro_batch_size", micro_batch_size)
        self._core.set_micro_batch_size(micro_batch_size)
        self._settings.update(micro_batch=micro_batch_size, train_batch=micro_batch_size * self._settings["gas"] * self.dp_world_size)

    def zero_optimization(self):
        """Whether anything is partitioned (stage 1 or more)."""
        return self._config.zero.stage > 0

    def zero_optimization_stage(self):
        """ZeRO stage, 0 to 3."""
        return self._config.zero.stage

    def zero_optimization_partition_gradients(self):
        """Whether gradients are partitioned (stage 2 or 3)."""
        return self._config.zero.stage >= 2

    def zero_optimization_partition_weights(self):
        """Whether parameters are partitioned (stage 3)."""
        return self._config.zero.stage >= 3

    def zero_offload_optimizer(self):
        """Device that optimizer states are offloaded to, by name; None: not offloaded."""
        return None if self._config.zero.offload_optimizer == "none" else self._config.zero.offload_optimizer

    def zero_offload_param(self):
        """Device that parameters are offloaded to, by name; None: not offloaded."""
        return None if self._config.zero.offload_param == "none" else self._config.zero.offload_param

    def zero_cpu_offload(self):
        """Whether optimizer states are offloaded to the CPU."""
        return self._config.zero.offload_optimizer == "cpu"

    def zero_gather_16bit_weights_on_model_save(self):
        """Whether save_16bit_model() writes at stage 3."""
        return self._config.zero.gather_16bit_weights_on_model_save

    def zero_reduce_bucket_size(self):
        """Elements of a gradient bucket, as resolved from the JSON and the model."""
        return self._core.config.zero.reduce_bucket_numel

    def zero_allgather_bucket_size(self):
        """Elements gathered in one message, as resolved."""
        return self._core.config.zero.allgather_bucket_numel

    def zero_prefetch_bucket_size(self):
        """Elements fetched ahead, as resolved."""
        return self._core.config.zero.prefetch_bucket_numel

    def zero_param_persistence_threshold(self):
        """Parameters of fewer elements stay whole at stage 3, as resolved."""
        return self._core.config.zero.param_persistence_threshold

    def fp16_enabled(self):
        """Whether the model's weights are fp16."""
        return self._config.fp16.enabled

    def bfloat16_enabled(self):
        """Whether the model's weights are bf16."""
        return self._config.bf16.enabled

    def torch_autocast_enabled(self):
        """Whether forward runs under torch.autocast."""
        return self._config.autocast.enabled

    def torch_autocast_dtype(self):
        """Its torch.dtype."""
        return self._config.autocast.dtype

    def fp16_auto_cast(self):
        """Whether forward casts floating inputs to fp16."""
        return self._config.fp16.auto_cast

    def gradient_clipping(self):
        """Largest global norm of the gradient, whole or not as in the JSON; 0: no clipping."""
        return self._as_written("gradient_clipping", self._config.gradient_clipping)

    def loss_scale(self):
        """Factor on the loss now; 1 without fp16. Of DeepSpeed's module: fp16.loss_scale as in the JSON, where 0 stands for a dynamic one
        (`optimizer.cur_scale` is the factor now)."""
        return self._config.fp16.loss_scale if self._answers_as_deepspeed else self._core.loss_scale()

    def dynamic_loss_scale(self):
        """Whether that factor is found by the engine (fp16 with loss_scale 0). Of DeepSpeed's module: without fp16 too."""
        return (self._config.fp16.enabled or self._answers_as_deepspeed) and self._config.fp16.loss_scale == 0

    def initial_dynamic_scale(self):
        """The factor that a dynamic loss scale begins with."""
        return 2**self._config.fp16.initial_scale_power

    def prescale_gradients(self):
        """As in the JSON."""
        return self._config.prescale_gradients

    def gradient_predivide_factor(self):
        """As in the JSON."""
        return self._as_written("gradient_predivide_factor", self._config.gradient_predivide_factor)

    def _as_written(self, key, value):
        """A whole number where the JSON has one."""
        given = self.config.get(key)
        return given if type(given) is int else value

    def steps_per_print(self):
        """Updates between two progress lines; None: no lines."""
        return self._config.steps_per_print

    def wall_clock_breakdown(self):
        """Whether the progress line tells times."""
        return self._config.wall_clock_breakdown

    def memory_breakdown(self):
        """Whether memory is told at start and with each progress line; memory_report() tells at any time."""
        return self._config.memory_breakdown

    def dump_state(self):
        """Whether the resolved configuration is printed at start."""
        return self._config.dump_state

    def optimizer_name(self):
        """The class of the program's own optimizer, else the JSON's type, in small letters where it is one of ours; None without."""
        if self.client_optimizer is not None:
            return type(self.client_optimizer).__name__
        name = self._config.optimizer.type or None
        return name.lower() if name and name.lower() in ("adam", "adamw", "adagrad", "lion") else name

    def optimizer_params(self):
        """The JSON's optimizer.params, as given; None without."""
        return self.config.get("optimizer", {}).get("params")

    def scheduler_name(self):
        """The JSON's scheduler type; None without."""
        return self._config.scheduler.type or None

    def scheduler_params(self):
        """The JSON's scheduler.params, as given; None without."""
        return self.config.get("scheduler", {}).get("params")

    @property
    def communication_data_type(self):
        """torch.dtype in which gradients travel: what the JSON names, else that of the model's weights."""
        return self._config.communication_dtype or self._config.compute_dtype() or torch.float32

    def get_data_types(self):
        """(dtype of the model's weights, dtype in which gradients accumulate). Of DeepSpeed's module: where the JSON names no second one,
        the first again, though they accumulate in fp32, as dtype_table() tells."""
        model = self._config.compute_dtype() or torch.float32
        return model, self._config.grad_accum_dtype or (model if self._answers_as_deepspeed else torch.float32)

    def _from_groups(self, key):
        return [] if self.optimizer is None else [group.get(key, 0.0) for group in self.optimizer.param_groups]

    def get_lr(self):
        """The learning rate of each group, as the next update will use it."""
        return self._from_groups("lr")

    def get_type(self):
        """"type" of each parameter group; 0.0 where a group has none."""
        return self._from_groups("type")

    def get_mom(self):
        """momentum or betas of each group; 0.0 where a group has neither."""
        return [] if self.optimizer is None else [g.get("momentum", g.get("betas", 0.0)) for g in self.optimizer.param_groups]


def _check_count(method, value):
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"[engine.{method}] {value!r} isn't a positive whole number")
