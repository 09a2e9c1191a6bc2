"""deepspeed.zero: partitioned models."""
import enum

from unshard import zero as _zero
from unshard import parameter_attributes as _attributes
from unshard.parameter_attributes import ZeroParamStatus, ZeroParamType
from unshard.tensor_constructors import FloatsIn
from unshard.tiled_linear import TiledLinear, TiledLinearReturnBias
from unshard.zero import GatheredParameters, register_external_parameter, unregister_external_parameter, unwrap_model_for_generation

from deepspeed._names import attribute_table


class DeepSpeedTensorOverride(enum.Enum):
    """What zero.Init changes of tensors that torch's constructors make inside."""
    dtype = 1
    device = 2           # accepted; devices are those that the code says


class Init(_zero.Init):
    """unshard.zero.Init, and the `ds_*` attributes of parameters. Inside, torch.zeros, torch.tensor, ... make floating tensors of the dtype
    that parameters get, unless they are told another or `tensor_overrides` leaves DeepSpeedTensorOverride.dtype out."""

    def __init__(self, *args, tensor_overrides=tuple(DeepSpeedTensorOverride), **keywords):
        _attributes.install()
        super().__init__(*args, **keywords)
        self._overrides_dtype = DeepSpeedTensorOverride.dtype in (tensor_overrides or ())
        self._floats = None

    def __enter__(self):
        super().__enter__()
        if self.enabled and self._overrides_dtype and self._dtype is not None:
            self._floats = FloatsIn(self._dtype, self._mine)
            self._floats.__enter__()
        return self

    def __exit__(self, kind, error, trace):
        if self._floats is not None:
            self._floats.__exit__(kind, error, trace)
            self._floats = None
        return super().__exit__(kind, error, trace)


__getattr__, __dir__ = attribute_table(__name__, {})
__all__ = ["DeepSpeedTensorOverride", "GatheredParameters", "Init", "TiledLinear", "TiledLinearReturnBias", "ZeroParamStatus",
           "ZeroParamType", "register_external_parameter", "unregister_external_parameter", "unwrap_model_for_generation"]
