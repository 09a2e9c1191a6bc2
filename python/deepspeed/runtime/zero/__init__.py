"""deepspeed.runtime.zero: the same as deepspeed.zero."""
from deepspeed._names import attribute_table
from deepspeed.zero import (DeepSpeedTensorOverride, GatheredParameters, Init, TiledLinear, TiledLinearReturnBias, ZeroParamStatus,
                            ZeroParamType, register_external_parameter, unregister_external_parameter, unwrap_model_for_generation)

_MODULES = ("offload_config", "partition_parameters", "stage3", "stage_1_and_2", "tiling")

__getattr__, __dir__ = attribute_table(__name__, {}, _MODULES)
__all__ = ["DeepSpeedTensorOverride", "GatheredParameters", "Init", "TiledLinear", "TiledLinearReturnBias", "ZeroParamStatus",
           "ZeroParamType", "register_external_parameter", "unregister_external_parameter", "unwrap_model_for_generation"]
