"""Events to every place that the JSON asks for."""
import torch.distributed as dist

from unshard.monitor.writers import CsvWriter, TensorBoardWriter, WandbWriter, Writer, need_package


class MonitorMaster(Writer):
    """Made on every rank; rank 0 writes, the others drop what they are given. `settings`: MonitorSettings."""

    def __init__(self, settings):
        super().__init__(settings)
        self.tb_monitor = self.wandb_monitor = self.csv_monitor = None
        for name in ("tensorboard", "wandb"):
            if getattr(settings, name).enabled:
                need_package(name)                      # on every rank, so that all fail or none
        if settings.enabled and (not dist.is_initialized() or dist.get_rank() == 0):
            self.tb_monitor = TensorBoardWriter(settings.tensorboard) if settings.tensorboard.enabled else None
            self.wandb_monitor = WandbWriter(settings.wandb) if settings.wandb.enabled else None
            self.csv_monitor = CsvWriter(settings.csv_monitor) if settings.csv_monitor.enabled else None

    def _writers(self):
        return [writer for writer in (self.tb_monitor, self.wandb_monitor, self.csv_monitor) if writer is not None]

    def write_events(self, event_list):
        """`event_list`: [(name, value, step)]"""
        for writer in self._writers():
            writer.write_events(event_list)

    def flush(self):
        for writer in self._writers():
            writer.flush()

    def close(self):
        for writer in self._writers():
            writer.close()
