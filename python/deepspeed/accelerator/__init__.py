"""What kind of device this process trains on."""
import functools

import torch
from unshard.distributed import device_of_this_rank, world_from_environment


class Accelerator:
    """A small part of DeepSpeed's accelerator interface, over torch's generic one."""

    def __init__(self):
        self._kind = device_of_this_rank().type
        self._module = torch.cpu if self._kind == "cpu" else getattr(torch, self._kind)

    def device_name(self, device_index=None):
        return self._kind if device_index is None or self._kind == "cpu" else f"{self._kind}:{device_index}"

    def current_device(self):
        return 0 if self._kind == "cpu" else self._module.current_device()

    def current_device_name(self):
        return self.device_name(None if self._kind == "cpu" else self.current_device())

    def device(self, device_index=None):
        return torch.device(self.device_name(device_index))

    def device_count(self):
        return 1 if self._kind == "cpu" else self._module.device_count()

    def set_device(self, device_index):
        if self._kind != "cpu":
            self._module.set_device(device_index)

    def is_available(self):
        return True

    def is_synchronized_device(self):
        return self._kind == "cpu"

    def synchronize(self, device_index=None):
        if self._kind != "cpu":
            self._module.synchronize(device_index)

    def empty_cache(self):
        if self._kind != "cpu":
            self._module.empty_cache()

    def communication_backend_name(self):
        return "gloo" if self._kind == "cpu" else "nccl"

    def is_bf16_supported(self):
        return self._kind == "cpu" or self._module.is_bf16_supported()

    def is_fp16_supported(self):
        return True

    def supported_dtypes(self):
        return [torch.float32, torch.float16, torch.bfloat16]

    def random(self):
        return torch.random

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def local_rank(self):
        return world_from_environment()[2]

    def pin_memory(self, tensor, align_bytes=1):
        return tensor if self._kind == "cpu" else tensor.pin_memory()

    def on_accelerator(self, tensor):
        return tensor.device.type == self._kind


@functools.cache
def get_accelerator():
    """The accelerator of this process."""
    return Accelerator()


__all__ = ["Accelerator", "get_accelerator"]
