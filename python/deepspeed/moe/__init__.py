"""deepspeed.moe: only what scripts ask of models that have no experts."""
from deepspeed._names import attribute_table

__getattr__, __dir__ = attribute_table(__name__, {}, modules=("utils",))
