"""Scalars of a run, written where the JSON asks: TensorBoard, Weights & Biases, CSV files. Rank 0 writes."""
from unshard.monitor.master import MonitorMaster
from unshard.monitor.settings import MonitorSettings
from unshard.monitor.writers import CsvWriter, TensorBoardWriter, WandbWriter, Writer

__all__ = ["CsvWriter", "MonitorMaster", "MonitorSettings", "TensorBoardWriter", "WandbWriter", "Writer"]
