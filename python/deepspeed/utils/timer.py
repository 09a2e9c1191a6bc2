"""Timers under DeepSpeed's names."""
from unshard.timers import Throughput as ThroughputTimer
from unshard.timers import Timer
from unshard.timers import Timers as SynchronizedWallClockTimer

__all__ = ["SynchronizedWallClockTimer", "ThroughputTimer", "Timer"]
