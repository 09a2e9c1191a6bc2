"""deepspeed.checkpoint: the conversion to the universal layout."""
from deepspeed._names import attribute_table

__getattr__, __dir__ = attribute_table(__name__, {}, modules=("ds_to_universal", "utils"))
