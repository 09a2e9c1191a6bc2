"""Under its old path."""
from deepspeed.monitor.monitor import csvMonitor

__all__ = ["csvMonitor"]
