"""What torch.distributed has no call for or names otherwise, and the log of its calls."""
import torch.distributed as dist

from unshard.config import load_config_dict
from unshard.comms_logger import show


def all_gather_into_tensor(output_tensor, tensor, group=None, async_op=False):
    """As torch's."""
    return dist.all_gather_into_tensor(output_tensor, tensor, group, async_op)


def reduce_scatter_tensor(output_tensor, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    """As torch's."""
    return dist.reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)


def all_to_all_single(output, tensor, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
    """As torch's."""
    return dist.all_to_all_single(output, tensor, output_split_sizes, input_split_sizes, group, async_op)


def all_reduce_coalesced(tensors, op=dist.ReduceOp.SUM, group=None, async_op=False):
    """all_reduce of each tensor. With `async_op` the handles."""
    handles = [dist.all_reduce(tensor, op, group, async_op) for tensor in tensors]
    return handles if async_op else None


def all_gather_coalesced(output_tensors, input_tensors, group=None, async_op=False):
    """all_gather_into_tensor of each pair. With `async_op` the handles."""
    handles = [dist.all_gather_into_tensor(out, mine, group, async_op) for out, mine in zip(output_tensors, input_tensors, strict=True)]
    return handles if async_op else None


def mesh(shape, names):
    """torch's DeviceMesh of that shape over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    from unshard.distributed import device_of_this_rank, init_distributed
    init_distributed()
    return init_device_mesh(device_of_this_rank().type, tuple(shape), mesh_dim_names=tuple(names))


def logger_section(config):
    """The section comms_logger of a DeepSpeed JSON (dict or path) or of a resolved configuration; {} without."""
    if config is None:
        return {}
    section = getattr(config, "comms_logger", None)
    section = load_config_dict(config).get("comms_logger") or {} if section is None else vars(section)
    known = ("enabled", "prof_all", "prof_ops", "verbose", "debug")
    return {key: value for key, value in section.items() if key in known and value != "auto"}


def log_summary(logger, show_straggler=False, return_dict=False):
    """Print on rank 0 what was logged; collective."""
    dist.barrier()
    summary = logger.summary(show_straggler)
    if dist.get_rank() == 0:
        print("communication of rank 0\n" + show(summary), flush=True)
    dist.barrier()
    return summary if return_dict else None
