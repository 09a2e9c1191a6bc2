"""What the engine says of itself while it trains: progress lines, memory, scalars for the monitors, timers."""
import gc

from unshard import memory_use
from unshard.core import _core
from unshard.loggers import logger, set_log_level_from_string
from unshard.timers import Throughput, Timers

_EVENT = "Train/Samples/"
_TIMES = {"elapsed_time_ms_forward": ("forward_ms",), "elapsed_time_ms_backward": ("backward_ms", "reduce_wait_ms"),
          "elapsed_time_ms_backward_inner": ("backward_ms",), "elapsed_time_ms_backward_allreduce": ("reduce_wait_ms",),
          "elapsed_time_ms_step": ("step_ms",)}


class EngineReport:
    """Mixed into Engine."""

    def _start_reports(self):
        """What the JSON asks of the process itself; stopwatches for the script's own use; and one of the engine's own, from the forward of
        each micro-batch to the end of its step."""
        self.timers = Timers()
        self.tput_timer = Throughput(self._settings["train_batch"], synchronize=False)
        if self.config.get("log_level"):
            set_log_level_from_string(self.config["log_level"])
        if self.config.get("disable_python_gc"):
            gc.disable()
        if self._config.memory_breakdown:
            memory_use.say("memory when the engine is made", self.global_rank)

    def collect_python_gc(self):
        """Run Python's cyclic collector, which `disable_python_gc` keeps from running by itself."""
        gc.collect()

    def get_wall_clock_timers(self):
        """Mean milliseconds of the script's own timers, by name."""
        return self.timers.get_mean(list(self.timers.get_timers()))

    def _report(self):
        """After an update, on rank 0."""
        if self.global_rank != 0:
            return
        every, step = self._config.steps_per_print, self._core.global_steps
        line_due = bool(every) and step % every == 0
        if self.monitor is not None and self.monitor.enabled:
            self.monitor.write_events(self._events(line_due))
        if not line_due:
            return
        _core.log_info(f"step={step}, skipped={self.skipped_steps}, lr={self.get_lr()}, mom={self.get_mom()}")
        if self._config.wall_clock_breakdown:
            _core.log_info("time: " + ", ".join(f"{k.removesuffix('_ms')} {v:.2f} ms" for k, v in self._core.times().items()))
        if self._config.memory_breakdown:
            logger.info(memory_use.memory_line(f"memory after step {step}"))

    def _events(self, with_times):
        values = {"lr": self.get_lr()[0]} if self.get_lr() else {}
        if self._config.fp16.enabled:
            values["loss_scale"] = self._core.loss_scale()
        if with_times and self._config.wall_clock_breakdown:
            times = self._core.times()
            values.update({name: sum(times[part] for part in parts) for name, parts in _TIMES.items()})
        return [(_EVENT + name, value, self.global_samples) for name, value in values.items()]
