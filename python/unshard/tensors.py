"""Tensors nested in lists, tuples and dicts: copied or moved, the rest as it is. And the bytes of one."""
import ctypes

import torch


def bytes_of(tensor):
    """A copy of the values' bytes, in row-major order, of a tensor on the CPU. torch may be there without NumPy."""
    tensor = tensor.contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b""


def move_to_device(item, device, criterion_func=lambda item: isinstance(item, torch.Tensor)):
    """`item` with what `criterion_func` accepts (tensors) on `device`."""
    return _mapped(item, lambda value: value.to(device), criterion_func)


@torch.no_grad()
def clone_tensors(item, device="cpu"):
    """`item` with copies of its tensors on `device`, each with a memory of its own size (a view of a large buffer isn't saved with all of
    it). Tensors that are the same memory (tied weights) have one copy; partitioned parameters are read whole."""
    copies = {}

    def copy(tensor):
        same = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if same not in copies:
            copies[same] = tensor.detach().clone(memory_format=torch.contiguous_format).to(device)
        return copies[same]
    return _mapped(item, copy)


def _mapped(item, function, accepts=lambda item: isinstance(item, torch.Tensor)):
    if accepts(item):
        return function(item)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(_mapped(value, function, accepts) for value in item))
    if isinstance(item, (list, tuple)):
        return type(item)(_mapped(value, function, accepts) for value in item)
    if isinstance(item, dict):
        return type(item)((key, _mapped(value, function, accepts)) for key, value in item.items())
    return item
