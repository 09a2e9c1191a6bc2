"""Names of partitioned parameters under their old path."""
from deepspeed.accelerator import get_accelerator
from deepspeed.zero import (GatheredParameters, Init, ZeroParamStatus, ZeroParamType, register_external_parameter,
                            unregister_external_parameter)

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus", "ZeroParamType", "get_accelerator", "register_external_parameter",
           "unregister_external_parameter"]
