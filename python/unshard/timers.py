"""Named stopwatches and a samples-per-second meter, for scripts that time themselves with them."""
import time

import torch

from unshard.loggers import logger
from unshard.memory_use import memory_line


def _now():
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Timer:
    """Adds up what lies between start() and stop()."""

    def __init__(self, name):
        self.name_ = name
        self.reset()

    def reset(self):
        self._started, self._times = None, []

    def start(self):
        if self._started is not None:
            raise RuntimeError(f"[timer '{self.name_}'] start() without a stop() since the last one")
        self._started = _now()

    def stop(self, reset=False, record=True):
        if self._started is None:
            raise RuntimeError(f"[timer '{self.name_}'] stop() without a start()")
        if reset:
            self._times.clear()
        if record:
            self._times.append(_now() - self._started)
        self._started = None

    def elapsed(self, reset=True):
        """Milliseconds since the last reset."""
        total = 1e3 * sum(self._times)
        if reset:
            self._times.clear()
        return total

    def mean(self):
        """Milliseconds, the mean of the laps."""
        return 1e3 * sum(self._times) / len(self._times) if self._times else 0.0


class Timers:
    """timers("forward").start()"""

    def __init__(self):
        self.timers = {}

    def __call__(self, name):
        return self.timers.setdefault(name, Timer(name))

    def get_timers(self):
        return self.timers

    def has_timer(self, name):
        return name in self.timers

    def get_mean(self, names, normalizer=1.0, reset=True):
        means = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        if reset:
            for name in means:
                self.timers[name].reset()
        return means

    def log(self, names, normalizer=1.0, reset=True, memory_breakdown=False, ranks=None):
        """One line of the times of `names`, in ms."""
        line = " | ".join(f"{name}: {self.timers[name].elapsed(reset) / normalizer:.2f}" for name in names if name in self.timers)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if rank in (ranks or [0]):
            logger.info(f"time (ms) | {line}")


class Throughput:
    """Samples per second between start() and stop(), one pair a micro-batch. The first `start_step` updates aren't counted.

    `synchronize`: wait for the GPU's work at both ends, else what is timed is only the issuing of it. `say` gets the lines."""

    def __init__(self, batch_size, start_step=2, steps_per_output=None, synchronize=True, enabled=True, with_memory=False, say=None):
        self.batch_size, self.start_step, self.steps_per_output = 1 if batch_size is None else batch_size, start_step, steps_per_output
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.enabled, self._with_memory = enabled, with_memory
        self._now, self._say = _now if synchronize else time.perf_counter, say or logger.info
        self._seconds, self._counted, self._started = 0.0, 0, None

    def update_epoch_count(self):
        """Another epoch begins: its micro-batches are counted from 0."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self):
        if self.enabled:
            self._started = self._now()

    def stop(self, global_step=False, report_speed=True):
        """End of a micro-batch; of an update too where `global_step` says so."""
        if self._started is None:
            return
        took, self._started = self._now() - self._started, None
        self.micro_step_count += 1
        self.global_step_count += bool(global_step)
        if self.global_step_count < self.start_step:
            return
        self._seconds += took
        if not global_step:
            return
        self._counted += 1
        if report_speed and self.steps_per_output and self.global_step_count % self.steps_per_output == 0:
            line = f"{self.avg_samples_per_sec():.2f} samples/s over {self._counted} steps"
            self._say(memory_line(line) if self._with_memory else line)

    def avg_samples_per_sec(self):
        return self.batch_size * self._counted / self._seconds if self._seconds else float("-inf")
