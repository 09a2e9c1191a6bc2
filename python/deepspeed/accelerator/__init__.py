"""deepspeed.accelerator: what kind of device this process trains on."""
from unshard.accelerator import Accelerator, get_accelerator, is_current_accelerator_supported

from deepspeed._names import attribute_table

DeepSpeedAccelerator = Accelerator

__getattr__, __dir__ = attribute_table(__name__, {}, modules=("real_accelerator", "abstract_accelerator"))
__all__ = ["Accelerator", "DeepSpeedAccelerator", "get_accelerator", "is_current_accelerator_supported"]
