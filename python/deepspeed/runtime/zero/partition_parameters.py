"""Names of partitioned parameters under their old path."""
import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.zero import (DeepSpeedTensorOverride, GatheredParameters, Init, ZeroParamStatus, ZeroParamType, register_external_parameter,
                            unregister_external_parameter)

# Hugging Face looks these up, to keep DeepSpeed's zero.Init from changing a dtype that torch.arange is told. Ours changes none that is.
_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(fn, target_fp_dtype, target_device=None):
    """`fn` as it is."""
    return fn


__all__ = ["DeepSpeedTensorOverride", "GatheredParameters", "Init", "ZeroParamStatus", "ZeroParamType", "get_accelerator",
           "register_external_parameter", "unregister_external_parameter", "zero_wrapper_for_fp_tensor_constructor"]
