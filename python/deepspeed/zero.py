"""deepspeed.zero: partitioned models."""
from unshard import zero as _zero
from unshard import parameter_attributes as _attributes
from unshard.parameter_attributes import ZeroParamStatus, ZeroParamType
from unshard.tiled_linear import TiledLinear, TiledLinearReturnBias
from unshard.zero import GatheredParameters, register_external_parameter, unregister_external_parameter, unwrap_model_for_generation

from deepspeed._names import attribute_table


class Init(_zero.Init):
    """unshard.zero.Init, and the `ds_*` attributes of parameters."""

    def __init__(self, *args, **keywords):
        _attributes.install()
        super().__init__(*args, **keywords)


__getattr__, __dir__ = attribute_table(__name__, {})
__all__ = ["GatheredParameters", "Init", "TiledLinear", "TiledLinearReturnBias", "ZeroParamStatus", "ZeroParamType",
           "register_external_parameter", "unregister_external_parameter", "unwrap_model_for_generation"]
