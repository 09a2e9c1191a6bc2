"""Helpers under their old path."""
import torch

from deepspeed._names import attribute_table


def move_to_device(item, device, criterion_func=lambda item: isinstance(item, torch.Tensor)):
    """Tensors in `item` (nested lists, tuples, dicts) on `device`."""
    if criterion_func(item):
        return item.to(device)
    if isinstance(item, (list, tuple)):
        return type(item)(move_to_device(v, device, criterion_func) for v in item)
    if isinstance(item, dict):
        return {k: move_to_device(v, device, criterion_func) for k, v in item.items()}
    return item


def see_memory_usage(message, force=False):
    """Print this process's memory when `force` is set."""
    if not force:
        return
    import resource

    from deepspeed.utils import logger
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    logger.info(f"{message}: peak resident memory {peak_kib / 2**20:.2f} GiB")


__getattr__, __dir__ = attribute_table(__name__, {})
__all__ = ["move_to_device", "see_memory_usage"]
