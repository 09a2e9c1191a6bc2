"""One writer a place. Events are (name, value, step)."""
import csv
import importlib.util
import os

from unshard.core import ConfigError


class Writer:
    """Takes events; `settings` is its section of the JSON."""

    def __init__(self, settings):
        self.settings = settings
        self.enabled = settings.enabled

    def write_events(self, event_list):
        raise NotImplementedError

    def flush(self):
        """All that was written is on its way to disk."""

    def close(self):
        """Nothing is written after it."""


class CsvWriter(Writer):
    """A file a name, `Train_Samples_lr.csv`: a line "step,lr", then one an event. Files of an earlier run are continued."""

    def __init__(self, settings):
        super().__init__(settings)
        self.log_dir = os.path.join(settings.output_path, settings.job_name)
        os.makedirs(self.log_dir, exist_ok=True)

    def write_events(self, event_list):
        by_name = {}
        for name, value, step in event_list:
            by_name.setdefault(name, []).append((int(step), _number(value)))
        for name, rows in by_name.items():
            path = os.path.join(self.log_dir, name.replace("/", "_").replace(" ", "_") + ".csv")
            with open(path, "a", newline="") as file:
                out = csv.writer(file, lineterminator="\n")
                if file.tell() == 0:
                    out.writerow(("step", name.split("/")[-1]))
                out.writerows(rows)


class TensorBoardWriter(Writer):
    """torch.utils.tensorboard's files. Raises ConfigError where the package tensorboard is missing."""

    def __init__(self, settings):
        super().__init__(settings)
        need_package("tensorboard")
        from torch.utils.tensorboard import SummaryWriter
        self.log_dir = os.path.join(settings.output_path, settings.job_name)
        os.makedirs(self.log_dir, exist_ok=True)
        self.summary_writer = SummaryWriter(log_dir=self.log_dir)

    def write_events(self, event_list, flush=True):
        for name, value, step in event_list:
            self.summary_writer.add_scalar(name, _number(value), int(step))
        if flush:
            self.flush()

    def flush(self):
        self.summary_writer.flush()

    def close(self):
        self.summary_writer.close()


class WandbWriter(Writer):
    """A run of Weights & Biases. Raises ConfigError where the package wandb is missing."""

    def __init__(self, settings):
        super().__init__(settings)
        need_package("wandb")
        import wandb
        self._wandb = wandb
        wandb.init(project=settings.project, group=settings.group, entity=settings.team)

    def log(self, data, step=None, commit=None):
        return self._wandb.log(data, step=step, commit=commit)

    def write_events(self, event_list):
        for name, value, step in event_list:
            self.log({name: _number(value)}, step=int(step))


def need_package(name):
    """Raises ConfigError where the package isn't installed."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:                     # or a folder of that name, such as wandb leaves behind
        raise ConfigError(f"[monitor] {name}.enabled is true, but the package {name} isn't installed: install it, or set enabled to false")


def _number(value):
    return value.item() if hasattr(value, "item") else value
