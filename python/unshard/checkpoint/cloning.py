"""Copies of state dicts whose tensors own just their own bytes."""
import torch


def clone_tensors_for_torch_save(item, device="cpu"):
    """`item` with each tensor in it copied to `device`. torch.save writes a view's whole storage, which may be a large flat buffer."""
    if isinstance(item, torch.Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, list):
        return [clone_tensors_for_torch_save(part, device) for part in item]
    if isinstance(item, tuple):
        return tuple(clone_tensors_for_torch_save(part, device) for part in item)
    if isinstance(item, dict):
        return type(item)({key: clone_tensors_for_torch_save(part, device) for key, part in item.items()})
    return item
