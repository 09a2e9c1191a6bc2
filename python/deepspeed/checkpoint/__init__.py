"""deepspeed.checkpoint: the conversion to the universal layout."""
from deepspeed._names import attribute_table

_HOME = {name: ("deepspeed.checkpoint.utils", name)
         for name in ("get_layer_ckpt_name_for_rank", "get_model_ckpt_name_for_rank", "get_zero_ckpt_name_for_rank")}
__getattr__, __dir__ = attribute_table(__name__, _HOME, modules=("ds_to_universal", "utils"))
