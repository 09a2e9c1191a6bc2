"""Under its old path."""
from deepspeed.ops.lamb import FusedLamb

__all__ = ["FusedLamb"]
