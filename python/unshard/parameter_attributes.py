"""The attributes that scripts read from partitioned parameters (`ds_shape`, `ds_numel`, ...), as properties of torch.nn.Parameter.

They are computed from the side table of owners: a parameter that no store has doesn't have them (`hasattr` is False).
"""
import enum

import torch

from unshard import owners


class ZeroParamStatus(enum.Enum):
    """Where a parameter's values are now."""
    AVAILABLE = 1            # whole, readable below torch's operators
    NOT_AVAILABLE = 2        # in shards; an operator that receives it makes it whole
    INFLIGHT = 3             # being gathered


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
    partitioned = _info(parameter, name)["partitioned"]
    return ZeroParamStatus.NOT_AVAILABLE if partitioned else ZeroParamStatus.AVAILABLE


def _shard(parameter, name):
    owner = _owner(parameter, name)
    return owner.store.own_slice(owner.id)


_READERS = {
    "ds_id": lambda p, name: _owner(p, name).id,
    "ds_shape": lambda p, name: torch.Size(_info(p, name)["sizes"]),
    "ds_numel": lambda p, name: _info(p, name)["numel"],
    "ds_status": _status,
    "ds_tensor": _shard,
    "ds_persist": lambda p, name: not _info(p, name)["partitioned"],
}


def install():
    """Idempotent; nothing else of torch is changed."""
    for name, reader in _READERS.items():
        if name not in torch.nn.Parameter.__dict__:
            setattr(torch.nn.Parameter, name, property(lambda self, reader=reader, name=name: reader(self, name)))
