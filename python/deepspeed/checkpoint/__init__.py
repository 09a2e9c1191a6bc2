"""deepspeed.checkpoint: helpers around checkpoint files."""
from deepspeed._names import attribute_table

__getattr__, __dir__ = attribute_table(__name__, {}, modules=("utils",))
