"""deepspeed.ops: optimizers under DeepSpeed's names. Nothing is compiled at run time."""
from deepspeed._names import attribute_table

__getattr__, __dir__ = attribute_table(__name__, {}, modules=("adam", "adagrad", "lamb", "lion"))
