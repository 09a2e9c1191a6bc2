"""deepspeed.checkpoint.utils."""
from unshard.tensors import clone_tensors


def clone_tensors_for_torch_save(item, device="cpu"):
    """`item` with copies of its tensors on `device`."""
    return clone_tensors(item, device)


__all__ = ["clone_tensors_for_torch_save"]
