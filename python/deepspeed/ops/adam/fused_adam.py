"""Under its old path."""
from deepspeed.ops.adam import FusedAdam

__all__ = ["FusedAdam"]
