"""Another dtype for what torch's constructors make."""
import torch
from torch.overrides import TorchFunctionMode

_CONSTRUCTORS = frozenset((torch.tensor, torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.eye, torch.randn))


class FloatsIn(TorchFunctionMode):
    """Context: floating tensors of torch.zeros, torch.tensor, ... for which no dtype is asked are of `dtype` while `in_force()` is true. On
    this thread; what other functions make (`.float()`, torch.sin) is left alone."""

    def __init__(self, dtype, in_force):
        super().__init__()
        self._dtype = dtype
        self._in_force = in_force

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if func in _CONSTRUCTORS and kwargs.get("dtype") is None and kwargs.get("out") is None and made.is_floating_point() \
                and made.dtype != self._dtype and self._in_force():
            made.data = made.data.to(self._dtype)
        return made
