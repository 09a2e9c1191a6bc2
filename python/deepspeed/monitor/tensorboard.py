"""Under its old path."""
from deepspeed.monitor.monitor import TensorBoardMonitor

__all__ = ["TensorBoardMonitor"]
