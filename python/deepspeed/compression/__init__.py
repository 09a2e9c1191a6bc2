"""deepspeed.compression: what is left of it in DeepSpeed 0.19.8."""
from deepspeed._names import attribute_table

__getattr__, __dir__ = attribute_table(__name__, {}, modules=("helper",))
