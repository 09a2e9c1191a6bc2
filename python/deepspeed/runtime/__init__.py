"""deepspeed.runtime: the pieces of it that scripts import."""
from deepspeed._names import attribute_table

_MODULES = ("activation_checkpointing", "base_optimizer", "config", "dataloader", "engine", "lr_schedules", "utils", "zero")

__getattr__, __dir__ = attribute_table(__name__, {}, _MODULES)
