"""deepspeed.checkpoint.utils: copies of tensors to save, and the names of files in folders that DeepSpeed wrote."""
import os

from unshard.tensors import clone_tensors


def clone_tensors_for_torch_save(item, device="cpu"):
    """`item` with copies of its tensors on `device`."""
    return clone_tensors(item, device)


def get_model_ckpt_name_for_rank(base_folder, mp_rank_str):
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt")


def get_zero_ckpt_name_for_rank(base_folder, dp_rank, mp_rank):
    return os.path.join(base_folder, f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt")


def get_layer_ckpt_name_for_rank(base_folder, layer_id, tp_rank):
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}_model_states.pt")


__all__ = ["clone_tensors_for_torch_save", "get_layer_ckpt_name_for_rank", "get_model_ckpt_name_for_rank", "get_zero_ckpt_name_for_rank"]
