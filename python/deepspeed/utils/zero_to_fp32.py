"""deepspeed.utils.zero_to_fp32, also `python -m`."""
import sys

from unshard.checkpoint.consolidate import (convert_zero_checkpoint_to_fp32_state_dict, convert_zero_checkpoint_to_state_dict,
                                            get_fp32_state_dict_from_zero_checkpoint, get_model_state_file, get_model_state_files,
                                            get_optim_files, load_state_dict_from_zero_checkpoint)
from unshard.checkpoint.zero_to_fp32_script import OUTPUT_DTYPE_NAMES
from unshard.checkpoint.zero_to_fp32_script import main as _main

__all__ = ["OUTPUT_DTYPE_NAMES", "convert_zero_checkpoint_to_fp32_state_dict", "convert_zero_checkpoint_to_state_dict",
           "get_fp32_state_dict_from_zero_checkpoint", "get_model_state_file", "get_model_state_files", "get_optim_files",
           "load_state_dict_from_zero_checkpoint"]

if __name__ == "__main__":
    sys.exit(_main(convert=convert_zero_checkpoint_to_state_dict))
