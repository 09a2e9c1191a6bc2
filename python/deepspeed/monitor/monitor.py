"""The monitors under DeepSpeed's names."""
from unshard.monitor import CsvWriter as csvMonitor
from unshard.monitor import MonitorMaster
from unshard.monitor import TensorBoardWriter as TensorBoardMonitor
from unshard.monitor import WandbWriter as WandbMonitor
from unshard.monitor import Writer as Monitor

__all__ = ["Monitor", "MonitorMaster", "TensorBoardMonitor", "WandbMonitor", "csvMonitor"]
