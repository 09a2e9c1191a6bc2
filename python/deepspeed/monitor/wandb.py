"""Under its old path."""
from deepspeed.monitor.monitor import WandbMonitor

__all__ = ["WandbMonitor"]
