"""Process groups by role. Data parallelism is the whole world; the others are single ranks."""
import torch.distributed as dist

from deepspeed._later import NotAvailable


def initialize(ep_size=1, mpu=None):
    """Nothing to do for expert-parallel size 1."""
    if ep_size != 1:
        raise NotAvailable(f"deepspeed.utils.groups.initialize(ep_size={ep_size})")


def _get_data_parallel_group():
    return dist.group.WORLD


def _get_data_parallel_group_ranks():
    return list(range(dist.get_world_size()))


def _get_data_parallel_world_size():
    return dist.get_world_size()


def _get_data_parallel_rank():
    return dist.get_rank()


get_data_parallel_group, get_data_parallel_world_size = _get_data_parallel_group, _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank
_get_sequence_data_parallel_group = _get_data_parallel_group
_get_sequence_data_parallel_world_size = _get_data_parallel_world_size
_get_sequence_data_parallel_rank = _get_data_parallel_rank


def _one():
    """Ranks of a kind of parallelism that there isn't."""
    return 1


def _none():
    """This rank's number in it."""
    return 0


_get_model_parallel_world_size = get_model_parallel_world_size = get_tensor_model_parallel_world_size = _one
_get_model_parallel_rank = get_model_parallel_rank = get_tensor_model_parallel_rank = _none
_get_sequence_parallel_world_size, _get_sequence_parallel_rank = _one, _none
_get_expert_model_parallel_world_size = _one


def _get_sequence_parallel_group():
    raise NotAvailable("deepspeed.utils.groups: sequence parallelism")


def _get_expert_parallel_group(group_name):
    raise NotAvailable("deepspeed.utils.groups: expert parallelism")


def _get_expert_data_parallel_group(group_name):
    raise NotAvailable("deepspeed.utils.groups: expert parallelism")
