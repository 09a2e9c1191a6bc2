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
    it). Tied weights come apart, as with DeepSpeed: a model that transformers saves at stages 0 to 2 has each of their names in its file.
    Partitioned parameters are read whole."""
    return _mapped(item, lambda tensor: tensor.detach().clone(memory_format=torch.contiguous_format).to(device))


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
