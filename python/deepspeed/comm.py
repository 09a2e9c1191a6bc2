"""deepspeed.comm: torch.distributed's calls, with DeepSpeed's extra keywords accepted."""
import functools

import torch.distributed as _dist
from torch.distributed import P2POp, ReduceOp, is_available, is_initialized, new_group
from unshard.distributed import init_distributed, world_from_environment

from deepspeed._names import attribute_table

_EXTRA = ("prof", "log_name", "debug")       # keywords of DeepSpeed's own communication log


def _plain(function, name=None):
    @functools.wraps(function)
    def call(*args, **keywords):
        for extra in _EXTRA:
            keywords.pop(extra, None)
        return function(*args, **keywords)
    call.__name__ = name or function.__name__
    return call


def get_rank(group=None):
    """Rank in `group` (default: the world)."""
    return _dist.get_rank(group)


def get_world_size(group=None):
    """Ranks in `group` (default: the world)."""
    return _dist.get_world_size(group)


def get_local_rank():
    """Rank among those of this host, as the launcher says."""
    return world_from_environment()[2]


def get_global_rank(group=None, group_rank=0):
    """World rank of a group's member."""
    return _dist.get_global_rank(group or _dist.group.WORLD, group_rank)


def get_all_ranks_from_group(group=None):
    """World ranks of a group's members."""
    return _dist.get_process_group_ranks(group or _dist.group.WORLD)


def get_world_group():
    """The group of all ranks."""
    return _dist.group.WORLD


def destroy_process_group(group=None):
    """End torch.distributed (or one group)."""
    _dist.destroy_process_group(group)


def all_reduce_coalesced(tensors, op=ReduceOp.SUM, group=None, async_op=False):
    """Reduce several tensors."""
    handles = [_dist.all_reduce(t, op, group, async_op) for t in tensors]
    return handles if async_op else None


def has_all_gather_into_tensor():
    """True: torch has it."""
    return True


def has_reduce_scatter_tensor():
    """True: torch has it."""
    return True


def configure(deepspeed_config=None, enabled=None, prof_all=None, prof_ops=None, verbose=None, debug=None):
    """Nothing to do: the engine counts its communication itself."""


barrier, monitored_barrier = _plain(_dist.barrier), _plain(_dist.monitored_barrier)
broadcast, broadcast_object_list = _plain(_dist.broadcast), _plain(_dist.broadcast_object_list)
all_reduce, inference_all_reduce = _plain(_dist.all_reduce), _plain(_dist.all_reduce, "inference_all_reduce")
reduce, reduce_scatter = _plain(_dist.reduce), _plain(_dist.reduce_scatter)
reduce_scatter_tensor = reduce_scatter_fn = _plain(_dist.reduce_scatter_tensor)
all_gather, all_gather_object = _plain(_dist.all_gather), _plain(_dist.all_gather_object)
all_gather_into_tensor = allgather_fn = _plain(_dist.all_gather_into_tensor)
all_to_all, all_to_all_single = _plain(_dist.all_to_all), _plain(_dist.all_to_all_single)
gather, scatter = _plain(_dist.gather), _plain(_dist.scatter)
gather_object, scatter_object_list = _plain(_dist.gather_object), _plain(_dist.scatter_object_list)
send, recv, isend, irecv = _plain(_dist.send), _plain(_dist.recv), _plain(_dist.isend), _plain(_dist.irecv)
batch_isend_irecv = _plain(_dist.batch_isend_irecv)

__getattr__, __dir__ = attribute_table(__name__, {})
__all__ = ["P2POp", "ReduceOp", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_reduce_coalesced",
           "all_to_all", "all_to_all_single", "allgather_fn", "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list",
           "configure", "destroy_process_group", "gather", "gather_object", "get_all_ranks_from_group", "get_global_rank",
           "get_local_rank", "get_rank", "get_world_group", "get_world_size", "inference_all_reduce", "init_distributed", "irecv",
           "is_available", "is_initialized", "isend", "monitored_barrier", "new_group", "recv", "reduce", "reduce_scatter",
           "reduce_scatter_fn", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send"]
