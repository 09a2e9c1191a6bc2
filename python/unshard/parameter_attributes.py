"""The attributes that scripts read from partitioned parameters (`ds_shape`, `ds_numel`, `all_gather()`, ...), as properties of
torch.nn.Parameter.

They are computed from the side table of owners: a parameter that no store has doesn't have them (`hasattr` is False).
"""
import enum

import torch

from torch.utils.weak import WeakTensorKeyDictionary

from unshard import owners

_gathered = WeakTensorKeyDictionary()      # parameter -> how often all_gather() pinned it
_inside = WeakTensorKeyDictionary()        # parameter -> how many GatheredParameters it is in


class ZeroParamStatus(enum.Enum):
    """Where a parameter's values are now."""
    AVAILABLE = 1            # whole, readable below torch's operators
    NOT_AVAILABLE = 2        # in shards; an operator that receives it makes it whole
    INFLIGHT = 3             # being gathered; never seen: gathering ends before control comes back


class ZeroParamType(enum.Enum):
    """What kind of parameter it is."""
    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


def _owner(parameter, name):
    owner = owners.find(parameter)
    if owner is None:
        raise AttributeError(f"'Parameter' object has no attribute '{name}' (neither an engine nor zero.Init has this parameter)")
    return owner


def _info(parameter, name):
    owner = _owner(parameter, name)
    return owner.store.info(owner.id)


def _status(parameter, name):
    away = _info(parameter, name)["partitioned"] and not _gathered.get(parameter) and not _inside.get(parameter)
    return ZeroParamStatus.NOT_AVAILABLE if away else ZeroParamStatus.AVAILABLE


def count_inside(parameters, change):
    """`parameters` enter (1) or leave (-1) a GatheredParameters."""
    for parameter in parameters:
        _inside[parameter] = _inside.get(parameter, 0) + change


def _shard(parameter, name):
    owner = _owner(parameter, name)
    return owner.store.own_slice(owner.id)


def _with(parameter, others):
    return [parameter] if others is None else [others] if isinstance(others, torch.Tensor) else list(others)


def _all_gather(parameter, name):
    def all_gather(param_list=None, async_op=False, hierarchy=0):
        """Make this parameter (or these) whole until partition()."""
        for one in _with(parameter, param_list):
            owner = _owner(one, name)
            if owner.store.info(owner.id)["partitioned"]:
                owner.store.pin([owner.id])
                _gathered[one] = _gathered.get(one, 0) + 1
    _owner(parameter, name)
    return all_gather


def _partition(parameter, name):
    def partition(param_list=None, hierarchy=0, has_been_updated=False, free_data=True):
        """Let go what all_gather() made whole; what was written meanwhile counts as everywhere."""
        for one in _with(parameter, param_list):
            owner = _owner(one, name)
            for _ in range(_gathered.pop(one, 0)):
                owner.store.unpin([owner.id])
    _owner(parameter, name)
    return partition


def _partition_numel(parameter, name):
    count = _info(parameter, name)["shard_numel"]
    return lambda: count


def _summary(parameter, name):
    def ds_summary(slice_shape=False, use_debug_name=False):
        """What is known of this parameter, as a dict."""
        info = _info(parameter, name)
        return {"id": info["name"] if use_debug_name else info["id"], "status": _status(parameter, name).name, "numel": parameter.numel(),
                "ds_numel": info["numel"], "shape": tuple(parameter.shape), "ds_shape": tuple(info["sizes"]),
                "requires_grad": parameter.requires_grad, "persist": not info["partitioned"],
                "ds_tensor.shape": tuple(_shard(parameter, name).shape)}
    _owner(parameter, name)
    return ds_summary


def _active_sub_modules(parameter, name):
    """Modules that are computing with it right now: none, between their operators nothing is held."""
    _owner(parameter, name)
    return set()


_READERS = {
    "ds_id": lambda p, name: _owner(p, name).id,
    "ds_shape": lambda p, name: torch.Size(_info(p, name)["sizes"]),
    "ds_numel": lambda p, name: _info(p, name)["numel"],
    "ds_status": _status,
    "ds_tensor": _shard,
    "ds_active_sub_modules": _active_sub_modules,
    "ds_persist": lambda p, name: not _info(p, name)["partitioned"],
    "all_gather": _all_gather,
    "partition": _partition,
    "partition_numel": _partition_numel,
    "ds_summary": _summary,
}


def install():
    """Idempotent; nothing else of torch is changed."""
    for name, reader in _READERS.items():
        if name not in torch.nn.Parameter.__dict__:
            setattr(torch.nn.Parameter, name, property(lambda self, reader=reader, name=name: reader(self, name)))
