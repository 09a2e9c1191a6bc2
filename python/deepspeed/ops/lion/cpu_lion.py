"""Under its old path."""
from deepspeed.ops.lion import DeepSpeedCPULion

__all__ = ["DeepSpeedCPULion"]
