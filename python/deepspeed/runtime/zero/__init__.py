"""deepspeed.runtime.zero: the same as deepspeed.zero."""
from deepspeed._names import attribute_table
from deepspeed.zero import (GatheredParameters, Init, ZeroParamStatus, ZeroParamType, register_external_parameter,
                            unregister_external_parameter)

__getattr__, __dir__ = attribute_table(__name__, {}, modules=("partition_parameters",))
__all__ = ["GatheredParameters", "Init", "ZeroParamStatus", "ZeroParamType", "register_external_parameter",
           "unregister_external_parameter"]
