"""A checkpoint's weights as one fp32 state dict, whoever wrote it, in memory or in files, one tensor at a time. The functions that
DeepSpeed's scripts call; what the script beside a checkpoint does for our own format alone, they do for every kind of folder."""
import os

from unshard.checkpoint.opening import open_checkpoint
from unshard.checkpoint.zero_to_fp32_script import lazy_state_dict, loaded, write_state_dict


def get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag=None, exclude_frozen_parameters=False, lazy_mode=False):
    """{name: fp32 tensor}: weights, tied names, buffers. With lazy_mode the tensors are read by their contiguous()."""
    state = lazy_state_dict(open_checkpoint(checkpoint_dir, tag), exclude_frozen_parameters)
    return state if lazy_mode else loaded(state)


def convert_zero_checkpoint_to_fp32_state_dict(checkpoint_dir, output_dir, max_shard_size="5GB", safe_serialization=False, tag=None,
                                               exclude_frozen_parameters=False, progress=None):
    """Write the weights in fp32 to `output_dir`: pytorch_model.bin or model.safetensors, in shards with an index where larger. Returns
    the names of the files. Memory: the largest tensor."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters, lazy_mode=True)
    return write_state_dict(state, os.fspath(output_dir), max_shard_size, safe_serialization, progress=progress)


def load_state_dict_from_zero_checkpoint(model, checkpoint_dir, tag=None):
    """Load the weights into a plain model, on the CPU; returns it."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model
