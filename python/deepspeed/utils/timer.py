"""Timers under DeepSpeed's names."""
from unshard.timers import Throughput, Timer
from unshard.timers import Timers as SynchronizedWallClockTimer


class ThroughputTimer(Throughput):
    """`config` has `enabled` and `synchronized`, as the section timers.throughput of the JSON."""

    def __init__(self, config, batch_size, start_step=2, steps_per_output=None, monitor_memory=False, logging_fn=None):
        super().__init__(batch_size, start_step, steps_per_output, config.synchronized, config.enabled, monitor_memory, logging_fn)


__all__ = ["SynchronizedWallClockTimer", "ThroughputTimer", "Timer"]
