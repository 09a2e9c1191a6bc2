"""What kind of device this process trains on, over torch's generic interface: DeepSpeed's accelerator object."""
import contextlib
import functools
import os

import torch

from unshard.distributed import device_of_this_rank, world_from_environment
from unshard.memory_use import machine_bytes, peak_resident_bytes, resident_bytes


class Accelerator:
    """Of this rank. On CPUs a stream, an event and a synchronisation are nothing, and memory is the process's."""

    def __init__(self):
        self._name = device_of_this_rank().type
        self._is_cpu = self._name == "cpu"
        self._module = torch.cpu if self._is_cpu else getattr(torch, self._name)
        self._compile_backend = "inductor"

    # ---- the device -----------------------------------------------------------------------------------------------------------------
    def device_name(self, device_index=None):
        return self._name if device_index is None or self._is_cpu else f"{self._name}:{device_index}"

    def device(self, device_index=None):
        return torch.device(self.device_name(device_index))

    def current_device(self):
        return 0 if self._is_cpu else self._module.current_device()

    def current_device_name(self):
        return self.device_name(None if self._is_cpu else self.current_device())

    def device_count(self):
        return 1 if self._is_cpu else self._module.device_count()

    def set_device(self, device_index):
        if not self._is_cpu:
            self._module.set_device(device_index)

    def is_available(self):
        return True

    def local_rank(self):
        return world_from_environment()[2]

    def communication_backend_name(self):
        return "gloo" if self._is_cpu else "nccl"

    def communication_backend_version(self):
        return None if self._is_cpu else torch.cuda.nccl.version()

    def visible_devices_envs(self):
        return [] if self._is_cpu else ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env, local_accelerator_ids):
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def export_envs(self):
        return [] if self._is_cpu else ["NCCL"]

    def get_compile_backend(self):
        return self._compile_backend

    def set_compile_backend(self, backend):
        self._compile_backend = backend

    # ---- what it can ----------------------------------------------------------------------------------------------------------------
    def is_synchronized_device(self):
        return self._is_cpu

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def is_bf16_supported(self):
        return self._is_cpu or self._module.is_bf16_supported()

    def is_fp16_supported(self):
        return True

    def is_fp64_supported(self):
        return True

    def supported_dtypes(self):
        return [torch.float32, torch.float16, torch.bfloat16]

    def is_triton_supported(self):
        return not self._is_cpu

    # ---- streams and events ---------------------------------------------------------------------------------------------------------
    def synchronize(self, device_index=None):
        if not self._is_cpu:
            self._module.synchronize(device_index)

    def Stream(self, device=None, priority=0, **keywords):
        return None if self._is_cpu else self._module.Stream(device, priority=priority, **keywords)

    def stream(self, stream):
        return contextlib.nullcontext() if self._is_cpu else self._module.stream(stream)

    def current_stream(self, device_index=None):
        return None if self._is_cpu else self._module.current_stream(device_index)

    def default_stream(self, device_index=None):
        return None if self._is_cpu else self._module.default_stream(device_index)

    @property
    def Event(self):
        return None if self._is_cpu else self._module.Event

    def range_push(self, msg):
        return None if self._is_cpu else torch.cuda.nvtx.range_push(msg)

    def range_pop(self):
        return None if self._is_cpu else torch.cuda.nvtx.range_pop()

    def lazy_call(self, callback):
        return callback()

    # ---- memory ---------------------------------------------------------------------------------------------------------------------
    def empty_cache(self):
        if not self._is_cpu:
            self._module.empty_cache()

    def memory_allocated(self, device_index=None):
        return resident_bytes() if self._is_cpu else self._module.memory_allocated(device_index)

    def max_memory_allocated(self, device_index=None):
        return peak_resident_bytes() if self._is_cpu else self._module.max_memory_allocated(device_index)

    def memory_reserved(self, device_index=None):
        return resident_bytes() if self._is_cpu else self._module.memory_reserved(device_index)

    def max_memory_reserved(self, device_index=None):
        return peak_resident_bytes() if self._is_cpu else self._module.max_memory_reserved(device_index)

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def memory_stats(self, device_index=None):
        if self._is_cpu:
            return {"allocated_bytes.all.current": resident_bytes(), "allocated_bytes.all.peak": peak_resident_bytes()}
        return self._module.memory_stats(device_index)

    def reset_peak_memory_stats(self, device_index=None):
        if not self._is_cpu:
            self._module.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def total_memory(self, device_index=None):
        return machine_bytes()[0] if self._is_cpu else self._module.get_device_properties(device_index).total_memory

    def available_memory(self, device_index=None):
        return machine_bytes()[1] if self._is_cpu else self._module.mem_get_info(device_index)[0]

    def pin_memory(self, tensor, align_bytes=1):
        return tensor if self._is_cpu else tensor.pin_memory()

    def is_pinned(self, tensor):
        return not self._is_cpu and tensor.is_pinned()

    def on_accelerator(self, tensor):
        return tensor.device.type == self._name

    # ---- random numbers -------------------------------------------------------------------------------------------------------------
    def random(self):
        return torch.random

    def _generator(self):
        return torch if self._is_cpu else self._module

    def set_rng_state(self, new_state, device_index=None):
        self._generator().set_rng_state(new_state, *([] if device_index is None or self._is_cpu else [device_index]))

    def get_rng_state(self, device_index=None):
        return self._generator().get_rng_state(*([] if device_index is None or self._is_cpu else [device_index]))

    def manual_seed(self, seed):
        return self._generator().manual_seed(seed)

    def manual_seed_all(self, seed):
        return torch.manual_seed(seed) if self._is_cpu else self._module.manual_seed_all(seed)

    def initial_seed(self):
        return self._generator().initial_seed()

    def default_generator(self, device_index=0):
        return torch.default_generator if self._is_cpu else self._module.default_generators[device_index]

    # ---- old names of tensor types --------------------------------------------------------------------------------------------------
    def _tensor(self, dtype):
        return functools.partial(torch.tensor, dtype=dtype, device=self.current_device_name())

    BFloat16Tensor = property(lambda self: self._tensor(torch.bfloat16))
    ByteTensor = property(lambda self: self._tensor(torch.uint8))
    DoubleTensor = property(lambda self: self._tensor(torch.float64))
    FloatTensor = property(lambda self: self._tensor(torch.float32))
    HalfTensor = property(lambda self: self._tensor(torch.float16))
    IntTensor = property(lambda self: self._tensor(torch.int32))
    LongTensor = property(lambda self: self._tensor(torch.int64))


@functools.cache
def get_accelerator():
    """The accelerator of this process."""
    return Accelerator()


def is_current_accelerator_supported():
    """Whether DS_ACCELERATOR, if it is set, names one that there is."""
    return os.environ.get("DS_ACCELERATOR", "cpu") in ("cpu", "cuda")
