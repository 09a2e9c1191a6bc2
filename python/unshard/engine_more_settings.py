"""Getters of settings that ask for something of DeepSpeed's machinery which the engine does otherwise: what the JSON says, else the
default."""


def _asked(path, default, doc):
    """A getter of the JSON's value at `path` ("zero_optimization.stage")."""
    keys = path.split(".")

    def getter(self):
        section = self.config
        for key in keys[:-1]:
            section = section.get(key) if isinstance(section, dict) else None
            section = {} if section is None else section
        value = section.get(keys[-1], default) if isinstance(section, dict) else default
        return default if value == "auto" else value
    getter.__doc__ = doc
    return getter


def _zero(key, default, doc):
    return _asked(f"zero_optimization.{key}", default, doc)


class EngineMoreSettings:
    """Mixed into Engine."""

    has_moe_layers = pipeline_parallelism = False           # neither is built
    sequence_parallel_size = 1
    gradient_average = property(lambda self: self._config.allreduce_mean)
    inside_no_sync_ctxt = property(lambda self: bool(self.__dict__.get("_in_no_sync")))
    seq_dp_world_size = property(lambda self: self.dp_world_size)

    zero_allgather_partitions = _zero("allgather_partitions", True, "As in the JSON.")
    zero_reduce_scatter = _zero("reduce_scatter", True, "As in the JSON; gradients are always reduced to their owners.")
    zero_contiguous_gradients = _zero("contiguous_gradients", True, "As in the JSON; gradients always lie in buckets.")
    zero_multi_rank_bucket_allreduce = _zero("use_multi_rank_bucket_allreduce", True, "As in the JSON.")
    zero_round_robin_gradients = _zero("round_robin_gradients", False, "As in the JSON.")
    zero_ignore_unused_parameters = _zero("ignore_unused_parameters", True, "As in the JSON; parameters may always be unused.")
    zero_elastic_checkpoint = _zero("elastic_checkpoint", False, "As in the JSON; checkpoints load at any number of ranks.")
    zero_load_from_fp32_weights = _zero("load_from_fp32_weights", True, "As in the JSON.")
    zero_sub_group_size = _zero("sub_group_size", 10**9, "As in the JSON; updates are made in place, without groups.")
    zero_module_granularity_threshold = _zero("stage3_module_granularity_threshold", 0, "As in the JSON.")
    zero_allgather_sequential = _zero("stage3_allgather_sequential", False, "As in the JSON.")
    zero_hpz_partition_size = _zero("zero_hpz_partition_size", 1, "As in the JSON.")
    zero_quantized_weights = _zero("zero_quantized_weights", False, "As in the JSON.")
    zero_quantized_nontrainable_weights = _zero("zero_quantized_nontrainable_weights", False, "As in the JSON.")
    zero_quantized_gradients = _zero("zero_quantized_gradients", False, "As in the JSON.")
    zero_log_trace_cache_warnings = _zero("log_trace_cache_warnings", False, "As in the JSON.")
    zero_compute_grad_norm = _zero("compute_grad_norm", True, "As in the JSON.")
    zero_parameter_alignment = _zero("parameter_alignment", False, "As in the JSON.")
    zero_partial_offload = _zero("offload_optimizer.ratio", 1.0, "Share of the optimizer's states that is offloaded.")
    zero_allow_untested_optimizer = _asked("zero_allow_untested_optimizer", False, "As in the JSON; not needed.")
    zero_force_ds_cpu_optimizer = _asked("zero_force_ds_cpu_optimizer", True, "As in the JSON; not needed.")
    optimizer_legacy_fusion = _asked("optimizer.legacy_fusion", False, "As in the JSON.")
    use_node_local_storage = _asked("checkpoint.use_node_local_storage", False, "Whether each host writes to storage of its own.")
    load_universal_checkpoint = _asked("checkpoint.load_universal", False, "As in the JSON.")
    checkpoint_serialization_enabled = _asked("checkpoint.checkpoint_serialization", True, "As in the JSON.")
    zero_legacy_stage1 = _zero("legacy_stage1", False, "As in the JSON.")
    flops_profiler_enabled = _asked("flops_profiler.enabled", False, "As in the JSON.")
    flops_profiler_profile_step = _asked("flops_profiler.profile_step", 1, "As in the JSON.")
    flops_profiler_module_depth = _asked("flops_profiler.module_depth", -1, "As in the JSON.")
    flops_profiler_top_modules = _asked("flops_profiler.top_modules", 1, "As in the JSON.")
    flops_profiler_detailed = _asked("flops_profiler.detailed", True, "As in the JSON.")
    flops_profiler_output_file = _asked("flops_profiler.output_file", None, "As in the JSON.")
    flops_profiler_recompute_fwd_factor = _asked("flops_profiler.recompute_fwd_factor", 0.0, "As in the JSON.")
    autotuning_enabled = _asked("autotuning.enabled", False, "As in the JSON.")
    data_efficiency_enabled = _asked("data_efficiency.enabled", False, "As in the JSON.")
    data_sampling_enabled = _asked("data_efficiency.data_sampling.enabled", False, "As in the JSON.")
    random_ltd_enabled = _asked("data_efficiency.data_routing.random_ltd.enabled", False, "As in the JSON.")
    curriculum_learning_enabled = _asked("data_efficiency.data_sampling.curriculum_learning.enabled", False, "As in the JSON.")
    autotp_size = _asked("tensor_parallel.autotp_size", 0, "As in the JSON.")
    log_level = _asked("log_level", None, "As in the JSON.")

    def zero_max_live_parameters(self):
        """Most gathered elements held, as resolved."""
        return self._core.config.zero.max_live_parameters

    def zero_max_reuse_distance(self):
        """As resolved."""
        return self._core.config.zero.max_reuse_distance

    def zero_model_persistence_threshold(self):
        """Most elements of parameters that stay whole at stage 3, as resolved."""
        return self._core.config.zero.model_persistence_threshold

    def zero_overlap_comm(self):
        """Whether gradients are reduced while backward goes on."""
        return self._core.config.zero.overlap_comm

    def zero_use_cpu_optimizer(self):
        """Whether optimizer states are offloaded."""
        return self._config.zero.offload_optimizer != "none"

    def zero_nvme_offload_optimizer(self):
        """Whether they are offloaded to NVMe."""
        return self._config.zero.offload_optimizer == "nvme"

    def dataloader_drop_last(self):
        """Whether loaders drop a last, smaller batch."""
        return self._config.dataloader_drop_last

    def managed_gradient_accumulation(self):
        """Whether the engine counts micro-batches; else every step() updates."""
        return self._config.managed_gradient_accumulation

    def postscale_gradients(self):
        """Whether gradients are divided after they are summed."""
        return not self._config.prescale_gradients

    def dynamic_loss_scale_args(self):
        """What a dynamic loss scale is set to."""
        fp16 = self._config.fp16
        floor = fp16.min_loss_scale
        return {"init_scale": 2**fp16.initial_scale_power, "scale_window": fp16.loss_scale_window, "delayed_shift": fp16.hysteresis,
                "consecutive_hysteresis": fp16.consecutive_hysteresis, "min_scale": int(floor) if floor == int(floor) else floor}

    def checkpoint_tag_validation_enabled(self):
        """Whether the ranks' tags are compared."""
        return self._tag_validation() != "ignore"

    def checkpoint_tag_validation_fail(self):
        """Whether different tags are an error."""
        return self._tag_validation() == "fail"

    def _tag_validation(self):
        return str((self.config.get("checkpoint") or {}).get("tag_validation", "Warn")).lower()

    def get_data_parallel_rank(self):
        """This rank among those that hold the same model."""
        return self.global_rank

    def get_model_parallel_rank(self):
        """0: there is one."""
        return 0

    get_tensor_parallel_rank = get_model_parallel_rank

    def get_sequence_parallel_group(self):
        """None: sequences aren't split."""
        return None
