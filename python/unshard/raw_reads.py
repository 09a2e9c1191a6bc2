"""Methods of tensors that read bytes below torch's operators, where users expect an answer of a partitioned parameter: printing, which
calls tolist, and `copy.deepcopy(model.state_dict())`. They get a whole copy; every other tensor is treated by torch as ever.
"""
import functools

import torch

_PARTITIONED = torch._C._dispatch_key_parse("DeferredInit")       # partitioned parameters and views of them have it (src/zero/touch.cc)
_tolist, _deepcopy = torch.Tensor.tolist, torch.Tensor.__deepcopy__


def _is_partitioned(tensor):
    return torch._C._dispatch_keys(tensor).has(_PARTITIONED)


@functools.wraps(_tolist)
def tolist(tensor):
    return _tolist(tensor.detach().clone() if _is_partitioned(tensor) else tensor)


@functools.wraps(_deepcopy)
def deepcopy(tensor, memo):
    if id(tensor) in memo or not _is_partitioned(tensor) or type(tensor) is not torch.Tensor or not tensor.is_leaf:
        return _deepcopy(tensor, memo)
    copied = memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return copied


def install():
    """Idempotent."""
    torch.Tensor.tolist, torch.Tensor.__deepcopy__ = tolist, deepcopy
