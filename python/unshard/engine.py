"""The training engine as a torch module."""
import contextlib
import os
import weakref

import torch

from unshard import owners
from unshard.compiling import admit_higher_order_operators
from unshard.core import CheckpointError, _core
from unshard.data import engine_loader
from unshard.optim import group_options

_PYTHON_STATE = "python_state.pt"      # beside the engine's own files: buffers, schedule, groups, the user's client_state


class Engine(torch.nn.Module):
    """Runs forward, backward and step of `module` at any ZeRO stage. Made by `initialize`; unknown attributes are the module's."""

    def __init__(self, module, core, config, config_dict, device, optimizer=None, client_optimizer=None, local_rank=0):
        super().__init__()
        self.module = module
        self._core = core
        self._store = core.store
        self._config = config
        self._settings = {"gas": config.batch.accumulation_steps, "train_batch": config.batch.train_batch_size,
                          "micro_batch": config.batch.micro_batch_size}
        self.config = config_dict
        self.device = device
        self.local_rank = local_rank
        self.global_rank = self._store.rank
        self.world_size = self.dp_world_size = self._store.world_size
        self.mp_world_size = 1
        self.data_parallel_group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
        self.mpu = self.monitor = self.timers = self.data_iterator = None
        self.client_optimizer = client_optimizer
        self.optimizer = self.basic_optimizer = None
        self.lr_scheduler = None
        self.training_dataloader = None
        self.collate_fn = None
        self.loaded_checkpoint_tag = None
        self.is_compiled = False
        self._names = {}                   # parameter -> name
        self._ids = {}                     # name -> id in the store
        self._waiting_values = {}          # id -> master weights that take effect at the next update
        self._index_parameters()
        if optimizer is not None:
            from unshard.optimizer import EngineOptimizer
            inner, handle = optimizer
            self.basic_optimizer = inner
            self.optimizer = EngineOptimizer(self, inner, handle)

    def _index_parameters(self):
        by_name = {self._store.info(i)["name"]: i for i in range(len(self._store))}
        owners.record_engine(self)
        for name, parameter in self.module.named_parameters():
            if name in by_name:
                self._names[parameter] = name
                self._ids[name] = by_name[name]
                owners.record(parameter, self._store, by_name[name], self)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise AttributeError(f"neither the engine nor its module {type(module).__name__} has an attribute {name!r}") from None
            return getattr(module, name)

    # ---- the step ------------------------------------------------------------------------------------------------------------------------
    def forward(self, *inputs, **keywords):
        """The module's forward, under autocast if configured."""
        if self._config.fp16.enabled and self._config.fp16.auto_cast:
            inputs, keywords = _cast_floats(inputs, torch.float16), _cast_floats(keywords, torch.float16)
        self._core.begin_forward()
        try:
            with self._autocast():
                return self.module(*inputs, **keywords)
        finally:
            self._core.end_forward()

    def _autocast(self):
        if not self._config.autocast.enabled:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._config.autocast.dtype)

    def backward(self, loss, retain_graph=False, scale_wrt_gas=True, **ignored):
        """Gradients of a scalar loss, added to those since the last update. Returns the loss divided by the accumulation steps.

        `loss.backward()` does the same (the engine scales the gradients that then arrive)."""
        return self._core.backward(loss, retain_graph, scale_wrt_gas)

    def scale(self, loss, scale_wrt_gas=True):
        """The loss as backward() would take it, for callers of `engine.scale(loss).backward()`."""
        return self._core.scale(loss, scale_wrt_gas)

    def step(self, lr_kwargs=None):
        """End of a micro-batch; at the accumulation boundary: reduce, check, clip, update, move the schedule."""
        boundary = self._core.is_gradient_accumulation_boundary()
        if boundary and self.optimizer is not None:
            self._apply_waiting_values()
            self._push_groups()
            self.optimizer.run_hooks("pre")
        self._core.step()
        if not boundary:
            return
        if self._core.was_step_applied():
            if self.optimizer is not None:
                self.optimizer.mark_stepped()
                self.optimizer.run_hooks("post")
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**(lr_kwargs or {}))
        self._report()

    def _apply_waiting_values(self):
        for id, value in self._waiting_values.items():
            self._core.set_full_fp32_param(id, value)
        self._waiting_values.clear()

    def _push_groups(self):
        for index, group in enumerate(self.optimizer.param_groups):
            self._core.set_group(index, group_options(group))

    def _report(self):
        every, step = self._config.steps_per_print, self._core.global_steps
        if not every or step % every or self.global_rank != 0:
            return
        _core.log_info(f"step={step}, skipped={self.skipped_steps}, lr={self.get_lr()}, mom={self.get_mom()}")
        if self._config.wall_clock_breakdown:
            _core.log_info("time: " + ", ".join(f"{k.removesuffix('_ms')} {v:.2f} ms" for k, v in self._core.times().items()))

    def zero_grad(self, set_to_none=True):
        """Drop the gradients of the accumulation so far."""
        self._core.zero_grad()

    def clip_fp32_gradients(self):
        """Nothing to do: clipping is part of step()."""

    def allreduce_gradients(self, bucket_size=None):
        """Nothing to do: gradients are reduced during backward and in step()."""

    @contextlib.contextmanager
    def no_sync(self):
        """Backwards inside add up locally; step() inside is an error. At every stage."""
        if self.__dict__.get("_in_no_sync"):
            raise RuntimeError("[engine.no_sync] already inside no_sync() or coalesce_grad_reduction(); they don't nest")
        self._in_no_sync = True
        self._core.set_no_sync(True)
        try:
            yield self
        finally:
            self._in_no_sync = False
            self._core.set_no_sync(False)

    def coalesce_grad_reduction(self):
        """Context: several backwards, one reduction after it, one step."""
        return self.no_sync()

    @contextlib.contextmanager
    def inference_mode(self):
        """Context: parameters are gathered once, and nothing inside communicates, so that ranks may run forward any number of times.
        Entered and left by all ranks; no gradients inside."""
        self._core.enter_inference()
        try:
            with torch.no_grad():
                yield self
        finally:
            self._core.leave_inference()

    def is_gradient_accumulation_boundary(self):
        return self._core.is_gradient_accumulation_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary):
        """Override the engine's own counting until the next call; None: back to counting."""
        self._core.set_gradient_accumulation_boundary(is_boundary)

    def was_step_applied(self):
        """Whether the last step() updated the parameters."""
        return self._core.was_step_applied()

    def get_global_grad_norm(self):
        """Norm of the last update's gradient before clipping; None before the first."""
        return self._core.last_grad_norm()

    def compute_grad_norm(self):
        """Norm of the gradient gathered so far: mean over ranks, unscaled, before clipping. Collective; between backward and step."""
        return self._core.compute_grad_norm()

    # ---- counters and settings -----------------------------------------------------------------------------------------------------------
    global_steps = property(lambda self: self._core.global_steps)
    global_samples = property(lambda self: self._core.global_samples)
    micro_steps = property(lambda self: self._core.micro_steps)
    skipped_steps = property(lambda self: self._core.skipped_steps)

    def train_batch_size(self):
        return self._settings["train_batch"]

    def train_micro_batch_size_per_gpu(self):
        return self._settings["micro_batch"]

    def gradient_accumulation_steps(self):
        return self._settings["gas"]

    def get_batch_info(self):
        """(train_batch_size, micro batch size, accumulation steps)"""
        return self._settings["train_batch"], self._settings["micro_batch"], self._settings["gas"]

    def set_train_batch_size(self, train_batch_size):
        """Change the accumulation steps so that an update sees this many samples."""
        per_step = self._settings["micro_batch"] * self.dp_world_size
        if train_batch_size < per_step or train_batch_size % per_step:
            raise ValueError(f"[engine.set_train_batch_size] {train_batch_size} isn't a multiple of micro batch x ranks = {per_step}")
        self._core.set_accumulation_steps(train_batch_size // per_step)
        self._settings.update(gas=train_batch_size // per_step, train_batch=train_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size):
        """Change the micro batch size; accumulation stays, so an update sees more samples."""
        if micro_batch_size < 1:
            raise ValueError(f"[engine.set_train_micro_batch_size] {micro_batch_size} isn't a positive number")
        self._settings.update(micro_batch=micro_batch_size, train_batch=micro_batch_size * self._settings["gas"] * self.dp_world_size)

    def zero_optimization(self):
        return self._config.zero.stage > 0

    def zero_optimization_stage(self):
        return self._config.zero.stage

    def zero_optimization_partition_gradients(self):
        return self._config.zero.stage >= 2

    def zero_optimization_partition_weights(self):
        return self._config.zero.stage >= 3

    def zero_offload_optimizer(self):
        return None if self._config.zero.offload_optimizer == "none" else self._config.zero.offload_optimizer

    def zero_offload_param(self):
        return None if self._config.zero.offload_param == "none" else self._config.zero.offload_param

    def zero_cpu_offload(self):
        return self._config.zero.offload_optimizer == "cpu"

    def zero_gather_16bit_weights_on_model_save(self):
        return self._config.zero.gather_16bit_weights_on_model_save

    def zero_reduce_bucket_size(self):
        return self._core.config.zero.reduce_bucket_numel

    def zero_allgather_bucket_size(self):
        return self._core.config.zero.allgather_bucket_numel

    def zero_prefetch_bucket_size(self):
        return self._core.config.zero.prefetch_bucket_numel

    def zero_param_persistence_threshold(self):
        return self._core.config.zero.param_persistence_threshold

    def fp16_enabled(self):
        return self._config.fp16.enabled

    def bfloat16_enabled(self):
        return self._config.bf16.enabled

    def torch_autocast_enabled(self):
        return self._config.autocast.enabled

    def torch_autocast_dtype(self):
        return self._config.autocast.dtype

    def fp16_auto_cast(self):
        return self._config.fp16.auto_cast

    def gradient_clipping(self):
        return self._config.gradient_clipping

    def loss_scale(self):
        return self._core.loss_scale()

    def dynamic_loss_scale(self):
        return self._config.fp16.enabled and self._config.fp16.loss_scale == 0

    def initial_dynamic_scale(self):
        return 2**self._config.fp16.initial_scale_power

    def prescale_gradients(self):
        return self._config.prescale_gradients

    def gradient_predivide_factor(self):
        return self._config.gradient_predivide_factor

    def steps_per_print(self):
        return self._config.steps_per_print

    def wall_clock_breakdown(self):
        return self._config.wall_clock_breakdown

    def memory_breakdown(self):
        return self._config.memory_breakdown

    def dump_state(self):
        return self._config.dump_state

    def optimizer_name(self):
        return self._config.optimizer.type or (type(self.client_optimizer).__name__ if self.client_optimizer is not None else None)

    def optimizer_params(self):
        return self.config.get("optimizer", {}).get("params")

    def scheduler_name(self):
        return self._config.scheduler.type or None

    def scheduler_params(self):
        return self.config.get("scheduler", {}).get("params")

    def communication_data_type(self):
        return self._config.communication_dtype

    def get_data_types(self):
        """(dtype of the model's weights, dtype in which gradients accumulate)"""
        model = self._config.compute_dtype() or torch.float32
        return model, self._config.grad_accum_dtype or torch.float32

    def _from_groups(self, key):
        return [] if self.optimizer is None else [group.get(key) for group in self.optimizer.param_groups]

    def get_lr(self):
        """The learning rate of each group, as the next update will use it."""
        return self._from_groups("lr")

    def get_type(self):
        return self._from_groups("type")

    def get_mom(self):
        """momentum or betas of each group."""
        return [] if self.optimizer is None else [g.get("momentum", g.get("betas")) for g in self.optimizer.param_groups]

    # ---- data ----------------------------------------------------------------------------------------------------------------------------
    def deepspeed_io(self, dataset, batch_size=None, route="train", pin_memory=True, data_sampler=None, collate_fn=None,
                     num_local_io_workers=None):
        """A loader of this rank's part of `dataset`; batch size: the micro batch."""
        if not isinstance(dataset, torch.utils.data.Dataset) and not hasattr(dataset, "__getitem__"):
            raise ValueError(f"[engine.deepspeed_io] a data set is needed, got {type(dataset).__name__}")
        return engine_loader(dataset, batch_size or self._settings["micro_batch"], self.dp_world_size, self.global_rank, data_sampler,
                             collate_fn or self.collate_fn, num_local_io_workers, pin_memory, self._config.dataloader_drop_last)

    # ---- memory ----------------------------------------------------------------------------------------------------------------------------
    def offload_states(self, include=None, device="cpu", pin_memory=True, non_blocking=False):
        """Move optimizer state, masters and gradients (`include`: names, default all) to `device` until reload_states()."""
        names = [str(getattr(item, "value", item)) for item in include or ()]
        self._core.offload_states(names, str(getattr(device, "value", device)))

    def reload_states(self, non_blocking=False):
        """Undo offload_states()."""
        self._core.reload_states()

    def empty_partition_cache(self):
        """Give back memory of gathered parameters that nothing uses now."""
        self._store.release_gathered()

    def memory_report(self):
        """Bytes of model state on this rank by kind, and what ZeRO's arithmetic says ("formula")."""
        return self._core.memory()

    def dtype_table(self):
        """Which dtype each kind of state has, as text."""
        return self._core.dtype_table()

    def destroy(self):
        """The module is a plain torch module again and the engine's memory is given back; the engine can't be used after it."""
        self._core.destroy()
        owners.forget(self._names, self)

    # ---- compile -------------------------------------------------------------------------------------------------------------------------
    def compile(self, backend="inductor", compile_kwargs=None, schedule=None, compiled_autograd_enabled=False):
        """torch.compile of the module, in place."""
        if schedule is not None or compiled_autograd_enabled:
            raise NotImplementedError("[engine.compile] schedule and compiled_autograd_enabled aren't available in unshard yet")
        admit_higher_order_operators()
        self.module.compile(backend=backend, **(compile_kwargs or {}))
        self.is_compiled = True

    # ---- state ---------------------------------------------------------------------------------------------------------------------------
    def module_state_dict(self, destination=None, prefix="", keep_vars=False, exclude_frozen_parameters=False):
        """The module's state dict (names without a prefix)."""
        state = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters():
                if not parameter.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def load_module_state_dict(self, checkpoint, strict=True, custom_load_fn=None, fetch_z3_params=False):
        """Load weights into the module, partitioned or not; a dict with the key "module" is opened first."""
        state = checkpoint["module"] if "module" in checkpoint and isinstance(checkpoint["module"], dict) else checkpoint
        if custom_load_fn is not None:
            custom_load_fn(src=state, dst=self.module)
        else:
            self.module.load_state_dict(state, strict=strict)
        self._store.settle()

    def _set_local_fp32(self, id, value):
        self._core.local_fp32_param(id).copy_(value)
        piece = self._store.own_slice(id)
        if piece.numel():
            piece.copy_(value)
        self._store.publish_one(id)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters=False):
        """Whole weights in the model's own dtype: CPU tensors on rank 0, None elsewhere. Collective; one parameter at a time."""
        from unshard.zero import whole
        wanted, copies = {}, {}
        for name, tensor in self.module_state_dict(keep_vars=True, exclude_frozen_parameters=exclude_frozen_parameters).items():
            if self.global_rank == 0 and isinstance(tensor, torch.Tensor):
                if id(tensor) not in copies:
                    with torch.no_grad(), whole([tensor]):
                        copies[id(tensor)] = tensor.detach().cpu().clone()
                tensor = copies[id(tensor)]
            wanted[name] = tensor
        self._store.check_all_in("consolidated state dict")
        return wanted if self.global_rank == 0 else None

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def save_16bit_model(self, save_dir, save_filename="pytorch_model.bin", exclude_frozen_parameters=False):
        """Whole weights in the model's own dtype to one file; collective. False at stage 3 without
        stage3_gather_16bit_weights_on_model_save."""
        if self._config.zero.stage == 3 and not self._config.zero.gather_16bit_weights_on_model_save:
            if self.global_rank == 0:
                _core.log_warning(0, "save_16bit_model: nothing saved; zero_optimization.stage3_gather_16bit_weights_on_model_save is false")
            return False
        state = self._consolidated_16bit_state_dict(exclude_frozen_parameters)
        if state is not None:
            os.makedirs(save_dir, exist_ok=True)
            torch.save(state, os.path.join(save_dir, save_filename))
        self._store.check_all_in("save_16bit_model")
        return True

    save_fp16_model = save_16bit_model

    def save_checkpoint(self, save_dir, tag=None, client_state=None, save_latest=True, exclude_frozen_parameters=False):
        """The whole training state to `save_dir/tag` (default global_step{N}); all ranks call. Returns True."""
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        folder = os.path.join(save_dir, tag)
        os.makedirs(folder, exist_ok=True)
        self._apply_waiting_values()
        self._core.save(folder)
        if self.global_rank == 0:
            torch.save(self._python_state(client_state or {}), os.path.join(folder, _PYTHON_STATE))
        self._store.check_all_in(f"save_checkpoint(tag={tag})")
        if save_latest and self.global_rank == 0:
            written = os.path.join(save_dir, ".latest")
            with open(written, "w") as file:
                file.write(tag)
            os.replace(written, os.path.join(save_dir, "latest"))
        self._store.check_all_in(f"save_checkpoint(tag={tag}), latest")
        return True

    def _python_state(self, client_state):
        groups = [] if self.optimizer is None else [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        schedule = self.lr_scheduler.state_dict() if hasattr(self.lr_scheduler, "state_dict") else None
        return {"buffers": dict(self.module.named_buffers()), "groups": groups, "lr_scheduler": schedule, "client_state": client_state}

    def load_checkpoint(self, load_dir, tag=None, load_module_strict=True, load_optimizer_states=True, load_lr_scheduler_states=True,
                        load_module_only=False, custom_load_fn=None):
        """Back to a saved state; all ranks call. Returns (path of the tag's file, client_state), or (None, None) when `load_dir` names no
        tag. Raises CheckpointError for a tag that isn't there or a file that can't be used."""
        if tag is None:
            latest = os.path.join(load_dir, "latest")
            if not os.path.isfile(latest):
                _core.log_warning(self.global_rank, f"load_checkpoint: {latest} isn't there; nothing was loaded")
                return None, None
            with open(latest) as file:
                tag = file.read().strip()
        folder = os.path.join(load_dir, str(tag))
        path = os.path.join(folder, _PYTHON_STATE)
        if not os.path.isfile(path):
            raise CheckpointError(f"[load_checkpoint] {folder} holds no checkpoint; tags there: "
                                  f"{sorted(e.name for e in os.scandir(load_dir) if e.is_dir()) if os.path.isdir(load_dir) else 'none'}")
        self._waiting_values.clear()
        self._core.load(folder, load_optimizer_states and not load_module_only)
        state = _read_python_state(path)
        own = dict(self.module.named_buffers())
        for name, value in state["buffers"].items():
            if name in own:
                own[name].copy_(value)
        if not load_module_only:
            if load_optimizer_states and self.optimizer is not None:
                self.optimizer.load_groups(state["groups"])
            if load_lr_scheduler_states and self.lr_scheduler is not None and state["lr_scheduler"] is not None:
                self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        self.loaded_checkpoint_tag = str(tag)
        return path, state["client_state"]


def _read_python_state(path):
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"[load_checkpoint] {path}: {str(error).splitlines()[0]} (client_state may hold numbers, text, lists, dicts "
                              "and tensors; admit other classes with torch.serialization.add_safe_globals)") from error


def _cast_floats(value, dtype):
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {k: _cast_floats(v, dtype) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast_floats(v, dtype) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_cast_floats(v, dtype) for v in value)
    return value


def make_source(module):
    """What the engine calls to see the parameters that the module has now; doesn't keep the module alive."""
    reference = weakref.ref(module)

    def source():
        current = reference()
        return [] if current is None else list(current.named_parameters())
    return source


def destroy_all():
    """destroy() every engine of this process; collective."""
    for engine in sorted(owners.engines(), key=lambda e: e._number):
        engine.destroy()
