"""A checkpoint's weights as one fp32 state dict, whoever wrote it, in memory or in files, one tensor at a time. The functions that
DeepSpeed's scripts call; what the script beside a checkpoint does for our own format alone, they do for every kind of folder."""
import glob
import os
import re

import torch

from unshard.checkpoint.opening import open_checkpoint
from unshard.checkpoint.zero_to_fp32_script import lazy_state_dict, loaded, output_dtype, write_state_dict


def get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag=None, exclude_frozen_parameters=False, lazy_mode=False):
    """{name: fp32 tensor}: weights, tied names, buffers. With lazy_mode the tensors are read by their contiguous()."""
    state = lazy_state_dict(open_checkpoint(checkpoint_dir, tag), exclude_frozen_parameters)
    return state if lazy_mode else loaded(state)


def convert_zero_checkpoint_to_state_dict(checkpoint_dir, output_dir, dtype=torch.float32, max_shard_size="5GB", safe_serialization=False,
                                          tag=None, exclude_frozen_parameters=False, progress=None):
    """Write the weights in `dtype` (or its name) to `output_dir`: pytorch_model.bin or model.safetensors, in shards with an index where
    larger. Returns the names of the files. Memory: the largest tensor."""
    dtype = output_dtype(dtype)
    state = lazy_state_dict(open_checkpoint(checkpoint_dir, tag), exclude_frozen_parameters, dtype)
    return write_state_dict(state, os.fspath(output_dir), max_shard_size, safe_serialization, progress=progress)


def convert_zero_checkpoint_to_fp32_state_dict(checkpoint_dir, output_dir, max_shard_size="5GB", safe_serialization=False, tag=None,
                                               exclude_frozen_parameters=False, progress=None):
    """The same in fp32."""
    return convert_zero_checkpoint_to_state_dict(checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag,
                                                 exclude_frozen_parameters, progress)


def _files_of_deepspeed(checkpoint_dir, pattern, function):
    """Those that DeepSpeed wrote, in the order of their ranks."""
    def by_rank(path):
        return [int(piece) if piece.isdigit() else piece for piece in re.split(r"(\d+)", path)]
    found = sorted(glob.glob(os.path.join(glob.escape(os.fspath(checkpoint_dir)), pattern)), key=by_rank)
    if not found:
        raise FileNotFoundError(f"[zero_to_fp32.{function}] no file {pattern} in {os.fspath(checkpoint_dir)}: DeepSpeed writes such files, "
                                "unshard's own checkpoints have none; convert_zero_checkpoint_to_fp32_state_dict and "
                                "get_fp32_state_dict_from_zero_checkpoint read both")
    return found


def get_optim_files(checkpoint_dir):
    """Paths of the optimizer states in a tag's folder that DeepSpeed wrote, for code that opens them with torch.load."""
    return _files_of_deepspeed(checkpoint_dir, "*_optim_states.pt", "get_optim_files")


def get_model_state_files(checkpoint_dir):
    """Paths of the model states in such a folder."""
    return _files_of_deepspeed(checkpoint_dir, "*_model_states.pt", "get_model_state_files")


def get_model_state_file(checkpoint_dir, zero_stage):
    """Path of the first rank's model states in such a folder."""
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if zero_stage == 3 else "mp_rank_00_model_states.pt"
    return _files_of_deepspeed(checkpoint_dir, name, "get_model_state_file")[0]


def load_state_dict_from_zero_checkpoint(model, checkpoint_dir, tag=None):
    """Load the weights into a plain model, on the CPU; returns it."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model
