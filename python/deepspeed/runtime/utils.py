"""Helpers under their old path."""
from unshard.gradients import clip_grad_norm_
from unshard.loggers import logger
from unshard.memory_use import memory_line
from unshard.random_seed import set_random_seed
from unshard.tensors import move_to_device

from deepspeed._names import attribute_table


def see_memory_usage(message, force=False):
    """Log this process's memory, the device's and the machine's, when `force` is set."""
    if force:
        logger.info(memory_line(message))


__getattr__, __dir__ = attribute_table(__name__, {})
__all__ = ["clip_grad_norm_", "move_to_device", "see_memory_usage", "set_random_seed"]
