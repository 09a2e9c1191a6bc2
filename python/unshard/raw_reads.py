"""Methods of tensors that go below torch's operators, where users expect an answer of a partitioned parameter: printing, which calls
tolist, `copy.deepcopy(model.state_dict())`, pickling and torch.save get a whole copy; who asks for addresses to see which tensors share
memory (safetensors, transformers), not to read there, gets numbers that say just that. Tensors like it can be made from data, and it can
be asked whether it is in shared memory. Every other tensor is treated by torch as ever.
"""
import functools
import sys

import torch

_PARTITIONED = torch._C._dispatch_key_parse("DeferredInit")       # partitioned parameters and views of them have it (src/zero/touch.cc)
_tolist, _deepcopy, _reduce = torch.Tensor.tolist, torch.Tensor.__deepcopy__, torch.Tensor.__reduce_ex__
_new, _new_tensor = torch.Tensor.new, torch.Tensor.new_tensor
_is_shared, _share_memory = torch.Tensor.is_shared, torch.Tensor.share_memory_
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


def _like(tensor):
    """An empty tensor of the same dtype and device that torch knows the device of."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device) if _is_partitioned(tensor) else tensor


@functools.wraps(_new)
def new(tensor, *args, **keywords):
    return _new(_like(tensor), *args, **keywords)


@functools.wraps(_new_tensor)
def new_tensor(tensor, *args, **keywords):
    """torch.nn.init.trunc_normal_ calls it."""
    return _new_tensor(_like(tensor), *args, **keywords)


@functools.wraps(_is_shared)
def is_shared(tensor):
    return False if _is_partitioned(tensor) else _is_shared(tensor)       # torch would end the process


@functools.wraps(_share_memory)
def share_memory(tensor):
    if _is_partitioned(tensor):
        raise RuntimeError("[share_memory_] a partitioned parameter has no memory that other processes could read; share a copy: "
                           "parameter.detach().clone().share_memory_()")
    return _share_memory(tensor)


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
    torch.Tensor.new, torch.Tensor.new_tensor = new, new_tensor
    torch.Tensor.is_shared, torch.Tensor.share_memory_ = is_shared, share_memory
    torch.Tensor.data_ptr, torch.UntypedStorage.data_ptr = address, storage_address
