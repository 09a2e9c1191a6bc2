"""The training engine as a torch module."""
import contextlib
import weakref

import torch

from unshard import owners
from unshard.compiling import admit_higher_order_operators, backend_for
from unshard.data import engine_loader
from unshard.engine_checkpoint import EngineCheckpoint
from unshard.engine_more_settings import EngineMoreSettings
from unshard.engine_report import EngineReport
from unshard.engine_settings import EngineSettings
from unshard.engine_state import EngineState
from unshard.optim import group_options

_SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Engine(EngineSettings, EngineMoreSettings, EngineReport, EngineState, EngineCheckpoint, torch.nn.Module):
    """Runs forward, backward and step of `module` at any ZeRO stage. Made by `initialize`; unknown attributes are the module's."""

    _answers_as_deepspeed = False

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
        self.mpu = self.monitor = self.data_iterator = self.training_data = None
        self.client_optimizer = client_optimizer
        self.optimizer = self.basic_optimizer = None
        self.lr_scheduler = None
        self.training_dataloader = None
        self.collate_fn = None
        self.loaded_checkpoint_tag = None
        self.is_compiled = False
        self._in_step = False
        self.enable_backward_allreduce = True
        self._names = {}                   # parameter -> name
        self._ids = {}                     # name -> id in the store
        self._client_face = None           # runs a client's own optimizer; see unshard.optimizer.ClientOptimizer
        self._recording = None             # rank 0, where this engine opened the timeline: see owners.record_timeline
        self._waiting_values = {}          # id -> master weights that take effect at the next update
        self._index_parameters()
        if optimizer is not None:
            from unshard.optimizer import EngineOptimizer
            inner, handle = optimizer
            self.basic_optimizer = inner
            self.optimizer = EngineOptimizer(self, inner, handle)
        self._start_reports()

    def _index_parameters(self):
        by_name = {self._store.info(i)["name"]: i for i in range(len(self._store))}
        owners.record_engine(self)
        for name, parameter in self.module.named_parameters():
            if name in by_name:
                self._names[parameter] = name
                self._ids[name] = by_name[name]
                owners.record(parameter, self._store, by_name[name], self)

    @property
    def param_names(self):
        """{parameter: its name}"""
        return dict(self._names)

    @property
    def data_parallel_group(self):
        """torch.distributed's group of all ranks, or None without one. Not kept here: destroy_process_group() must end it."""
        return torch.distributed.group.WORLD if torch.distributed.is_initialized() else None

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise AttributeError(f"neither the engine nor its module {type(module).__name__} has an attribute {name!r}") from None
            return getattr(module, name)

    def train(self, mode=True):
        """The module in training mode (or not). Returns the engine; None where DeepSpeed's module made it."""
        super().train(mode)
        return None if self._answers_as_deepspeed else self

    # ---- the step -------------------------------------------------------------------------------------------------------------------
    def forward(self, *inputs, **keywords):
        """The module's forward, under autocast if configured."""
        if self._config.fp16.enabled and self._config.fp16.auto_cast:
            inputs, keywords = _cast_floats(inputs, torch.float16), _cast_floats(keywords, torch.float16)
        if torch.is_grad_enabled():
            self.tput_timer.start()
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

    def backward(self, loss, retain_graph=False, scale_wrt_gas=True):
        """Gradients of a scalar loss, added to those since the last update. Returns the loss divided by the accumulation steps.

        `loss.backward()` does the same (the engine scales the gradients that then arrive)."""
        return self._core.backward(loss, retain_graph, scale_wrt_gas)

    def scale(self, loss, scale_wrt_gas=True):
        """The loss times the loss scale, for callers of `engine.scale(loss).backward()`; gradients come out as those of backward()."""
        return self._core.scale(loss, scale_wrt_gas)

    def step(self, lr_kwargs=None):
        """End of a micro-batch; at the accumulation boundary: reduce, check, clip, update, move the schedule."""
        self._in_step = True
        try:
            self._step(lr_kwargs)
        finally:
            self._in_step = False

    def _step(self, lr_kwargs):
        boundary = self._core.is_gradient_accumulation_boundary()
        if boundary and self.optimizer is not None:
            self._apply_waiting_values()
            self._push_groups()
            self.optimizer.run_hooks("pre")
        self._core.step()
        self.tput_timer.stop(global_step=boundary)
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
        """Whether the next step() updates the parameters. Without managed_gradient_accumulation every one does, and this is True only
        inside it."""
        return self._core.is_gradient_accumulation_boundary() and (self._config.managed_gradient_accumulation or self._in_step)

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

    # ---- data -----------------------------------------------------------------------------------------------------------------------
    def deepspeed_io(self, dataset, batch_size=None, route="train", pin_memory=True, data_sampler=None, collate_fn=None,
                     num_local_io_workers=None):
        """A loader of this rank's part of `dataset`; batch size: the micro batch. Shuffled on the route "train", in order on "eval" and
        "predict"."""
        if not isinstance(dataset, torch.utils.data.Dataset) and not hasattr(dataset, "__getitem__"):
            raise ValueError(f"[engine.deepspeed_io] a data set is needed, got {type(dataset).__name__}")
        return engine_loader(dataset, batch_size or self._settings["micro_batch"], self.dp_world_size, self.global_rank, data_sampler,
                             collate_fn or self.collate_fn, num_local_io_workers, pin_memory, self._config.dataloader_drop_last,
                             shuffle=route == "train")

    # ---- memory ---------------------------------------------------------------------------------------------------------------------
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
        found = {_SHORT_NAMES.get(b.dtype, str(b.dtype).removeprefix("torch.")) for b in self.module.buffers()}
        return self._core.dtype_table().replace("as they are in the model", ", ".join(sorted(found)) or "none")

    def destroy(self):
        """The module is a plain torch module again and the engine's memory is given back; the engine can't be used after it."""
        try:
            self._core.destroy()                      # raises what went wrong with a save in the background, when all else is done
        finally:
            owners.forget(self._names, self)
            if self._recording is not None:
                owners.finish_timeline(self._recording)

    # ---- compile --------------------------------------------------------------------------------------------------------------------
    def compile(self, backend="inductor", compile_kwargs=None, schedule=None, compiled_autograd_enabled=False):
        """torch.compile of the module, in place."""
        if schedule is not None or compiled_autograd_enabled:
            raise NotImplementedError("[engine.compile] schedule and compiled_autograd_enabled aren't available in unshard yet")
        admit_higher_order_operators()
        self.module.compile(backend=backend_for(backend), **(compile_kwargs or {}))
        self.is_compiled = True


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


class DeepSpeedEngine(Engine):
    """What `deepspeed.initialize` makes: train() and eval() return None, not the engine as in torch; loss_scale() is the JSON's."""

    _answers_as_deepspeed = True
