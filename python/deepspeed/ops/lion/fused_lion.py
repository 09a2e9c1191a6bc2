"""Under its old path."""
from deepspeed.ops.lion import FusedLion

__all__ = ["FusedLion"]
