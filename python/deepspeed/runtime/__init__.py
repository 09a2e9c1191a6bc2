"""deepspeed.runtime: the pieces of it that scripts import."""
from deepspeed._names import attribute_table

__getattr__, __dir__ = attribute_table(__name__, {}, modules=("lr_schedules", "engine", "dataloader", "zero", "utils"))
