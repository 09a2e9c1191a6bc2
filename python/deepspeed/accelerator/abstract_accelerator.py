"""Under its old path."""
from unshard.accelerator import Accelerator as DeepSpeedAccelerator

__all__ = ["DeepSpeedAccelerator"]
