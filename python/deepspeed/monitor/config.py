"""The monitors' sections of the JSON under DeepSpeed's names."""
from unshard.monitor.settings import FileSettings as CSVConfig
from unshard.monitor.settings import FileSettings as TensorBoardConfig
from unshard.monitor.settings import MonitorSettings as DeepSpeedMonitorConfig
from unshard.monitor.settings import WandbSettings as WandbConfig


def get_monitor_config(param_dict):
    """Of a configuration as a dict."""
    return DeepSpeedMonitorConfig.of(param_dict)


__all__ = ["CSVConfig", "DeepSpeedMonitorConfig", "TensorBoardConfig", "WandbConfig", "get_monitor_config"]
