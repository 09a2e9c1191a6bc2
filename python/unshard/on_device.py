"""Build a model elsewhere and in another dtype, without changing its code."""
import contextlib

import torch


@contextlib.contextmanager
def on_device(dtype, device="meta", enabled=True):
    """Context: new tensors are on `device` (unless one is named), new floating ones of `dtype`; "meta" holds no values."""
    if not enabled:
        yield
        return
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


class OnDevice(contextlib.ContextDecorator):
    """on_device as a class."""

    def __init__(self, dtype, device="meta", enabled=True):
        self._arguments, self._entered = (dtype, device, enabled), []

    def __enter__(self):
        context = on_device(*self._arguments)
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error):
        return self._entered.pop().__exit__(*error)
