"""deepspeed.comm: torch.distributed's calls, with DeepSpeed's extra keywords and its log of them."""
import torch.distributed as _dist
from torch.distributed import ReduceOp, is_available, is_initialized, new_group
from unshard import comm_calls as _calls
from unshard import comms_logger as _log
from unshard.distributed import init_distributed as _init_distributed
from unshard.distributed import world_from_environment

from deepspeed._names import attribute_table

comms_logger = _log.CommsLogger()


def _plain(function, name=None):
    return _log.recorded(comms_logger, function, name)


def init_distributed(dist_backend=None, auto_mpi_discovery=True, distributed_port=29500, verbose=True, timeout=None, init_method=None,
                     dist_init_required=None, config=None, rank=-1, world_size=-1):
    """Start torch.distributed unless it runs; see unshard.init_distributed. `config`: a DeepSpeed JSON whose comms_logger counts."""
    if config is not None:
        configure(config)
    keywords = {} if timeout is None else {"timeout": timeout}
    return _init_distributed(dist_backend, auto_mpi_discovery, distributed_port, verbose, init_method=init_method,
                             dist_init_required=dist_init_required, rank=rank, world_size=world_size, **keywords)


def configure(deepspeed_config=None, enabled=None, prof_all=None, prof_ops=None, verbose=None, debug=None):
    """Set up the log of communication: from a DeepSpeed JSON (dict, path or DeepSpeedConfig), or switch by switch."""
    comms_logger.configure(**_calls.logger_section(deepspeed_config))
    comms_logger.configure(enabled, prof_all, prof_ops, verbose, debug)


def log_summary(show_straggler=False, return_dict=False):
    """Print what was logged on rank 0; all ranks call. With `return_dict` also return it, on every rank."""
    return _calls.log_summary(comms_logger, show_straggler, return_dict)


def reset_log():
    """Forget what was logged."""
    comms_logger.reset()


def has_comm_data():
    """Whether anything was logged."""
    return comms_logger.has_data()


def get_comm_operation_count():
    """Number of calls logged."""
    return sum(comms_logger.counts().values())


def get_logged_comm_ops():
    """Names of the operations logged."""
    return list(comms_logger.counts())


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
    """As torch's."""
    _dist.destroy_process_group(group)


def initialize_mesh_device(mesh_shape, mesh_dim_names):
    """torch's device mesh of that shape over all ranks."""
    return _calls.mesh(mesh_shape, mesh_dim_names)


def has_all_gather_into_tensor():
    """True: torch has it."""
    return True


def has_reduce_scatter_tensor():
    """True: torch has it."""
    return True


def has_all_reduce_coalesced():
    """True."""
    return True


def has_coalescing_manager():
    """True: torch has it."""
    return True


barrier, monitored_barrier = _plain(_dist.barrier), _plain(_dist.monitored_barrier)
broadcast, broadcast_object_list = _plain(_dist.broadcast), _plain(_dist.broadcast_object_list)
all_reduce, inference_all_reduce = _plain(_dist.all_reduce), _plain(_dist.all_reduce, "inference_all_reduce")
all_reduce_coalesced, all_gather_coalesced = _plain(_calls.all_reduce_coalesced), _plain(_calls.all_gather_coalesced)
reduce, reduce_scatter = _plain(_dist.reduce), _plain(_dist.reduce_scatter)
reduce_scatter_tensor = reduce_scatter_fn = _plain(_calls.reduce_scatter_tensor)
all_gather, all_gather_object = _plain(_dist.all_gather), _plain(_dist.all_gather_object)
all_gather_into_tensor = _plain(_calls.all_gather_into_tensor)
allgather_fn = _plain(_dist.all_gather_into_tensor)
all_to_all, all_to_all_single = _plain(_dist.all_to_all), _plain(_calls.all_to_all_single)
gather, scatter = _plain(_dist.gather), _plain(_dist.scatter)
gather_object, scatter_object_list = _plain(_dist.gather_object), _plain(_dist.scatter_object_list)
send, recv, isend, irecv = _plain(_dist.send), _plain(_dist.recv), _plain(_dist.isend), _plain(_dist.irecv)
batch_isend_irecv = _plain(_dist.batch_isend_irecv)


class P2POp(_dist.P2POp):
    """torch's, of isend or irecv of this module or of torch.distributed."""

    def __new__(cls, op, *args, **keywords):
        return super().__new__(cls, _of_torch(op), *args, **keywords)

    def __init__(self, op, *args, **keywords):
        super().__init__(_of_torch(op), *args, **keywords)


def _of_torch(op):
    return op.__wrapped__ if op in (isend, irecv) else op


__getattr__, __dir__ = attribute_table(__name__, {})
__all__ = ["P2POp", "ReduceOp", "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce",
           "all_reduce_coalesced", "all_to_all", "all_to_all_single", "allgather_fn", "barrier", "batch_isend_irecv", "broadcast",
           "broadcast_object_list", "comms_logger", "configure", "destroy_process_group", "gather", "gather_object",
           "get_all_ranks_from_group", "get_comm_operation_count", "get_global_rank", "get_local_rank", "get_logged_comm_ops", "get_rank",
           "get_world_group", "get_world_size", "has_all_gather_into_tensor", "has_all_reduce_coalesced", "has_coalescing_manager",
           "has_comm_data", "has_reduce_scatter_tensor", "inference_all_reduce", "init_distributed", "initialize_mesh_device", "irecv",
           "is_available", "is_initialized", "isend", "log_summary", "monitored_barrier", "new_group", "recv", "reduce", "reduce_scatter",
           "reduce_scatter_fn", "reduce_scatter_tensor", "reset_log", "scatter", "scatter_object_list", "send"]
