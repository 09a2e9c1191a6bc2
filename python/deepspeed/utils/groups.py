"""Process groups by role. Data parallelism is the whole world; the others are single ranks."""
import torch.distributed as dist


def _get_data_parallel_group():
    return dist.group.WORLD


def _get_data_parallel_world_size():
    return dist.get_world_size()


def _get_data_parallel_rank():
    return dist.get_rank()


_get_sequence_data_parallel_group = _get_data_parallel_group
_get_sequence_data_parallel_world_size = _get_data_parallel_world_size
_get_sequence_data_parallel_rank = _get_data_parallel_rank


def _get_model_parallel_world_size():
    return 1


def _get_model_parallel_rank():
    return 0


def _get_sequence_parallel_world_size():
    return 1


def _get_sequence_parallel_rank():
    return 0


def _get_sequence_parallel_group():
    raise NotImplementedError("deepspeed.utils.groups: sequence parallelism is not available in unshard yet")


def _get_expert_parallel_group(group_name):
    raise NotImplementedError("deepspeed.utils.groups: expert parallelism is not available in unshard yet")
