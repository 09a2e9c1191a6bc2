"""Methods of tensors that go below torch's operators, where users expect an answer of a partitioned parameter: printing, which calls
tolist, `copy.deepcopy(model.state_dict())`, pickling and torch.save get a whole copy; who asks for addresses to see which tensors share
memory (safetensors, transformers), not to read there, gets numbers that say just that. Every other tensor is treated by torch as ever.
"""
import functools
import sys

import torch

_PARTITIONED = torch._C._dispatch_key_parse("DeferredInit")       # partitioned parameters and views of them have it (src/zero/touch.cc)
_tolist, _deepcopy, _reduce = torch.Tensor.tolist, torch.Tensor.__deepcopy__, torch.Tensor.__reduce_ex__
_address, _storage_address = torch.Tensor.data_ptr, torch.UntypedStorage.data_ptr
# Their functions that ask for a tensor's address to compare it.
_COMPARE = ("_end_ptr", "_filter_shared_not_shared", "_find_disjoint", "_find_identical", "_is_complete")
_NOWHERE = 1 << 63                                               # no address that a program can have: reading there fails


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


@functools.wraps(_reduce)
def reduce(tensor, protocol):
    """A parameter's own method pickles its `.data`, which comes here. torch.save keeps the copy's storage until it is written."""
    if type(tensor) is torch.Tensor and _is_partitioned(tensor):
        tensor = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return _reduce(tensor, protocol)


@functools.wraps(_address)
def address(tensor):
    try:
        return _address(tensor)
    except RuntimeError:
        if not _is_partitioned(tensor) or sys._getframe(1).f_code.co_name not in _COMPARE:
            raise
        return storage_address(tensor.untyped_storage()) + tensor.storage_offset() * tensor.element_size()


@functools.wraps(_storage_address)
def storage_address(storage):
    try:
        return _storage_address(storage)
    except RuntimeError as error:
        if "is partitioned" not in str(error):
            raise
        return _NOWHERE | storage._cdata


def install():
    """Idempotent."""
    torch.Tensor.tolist, torch.Tensor.__deepcopy__, torch.Tensor.__reduce_ex__ = tolist, deepcopy, reduce
    torch.Tensor.data_ptr, torch.UntypedStorage.data_ptr = address, storage_address
