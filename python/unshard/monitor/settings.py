"""The monitors' sections of the JSON."""
from dataclasses import dataclass, field


@dataclass
class FileSettings:
    """`tensorboard` and `csv_monitor`: files go to output_path/job_name."""
    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


@dataclass
class WandbSettings:
    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


@dataclass
class MonitorSettings:
    """What is to be written, of a configuration as a dict."""
    tensorboard: FileSettings = field(default_factory=FileSettings)
    wandb: WandbSettings = field(default_factory=WandbSettings)
    csv_monitor: FileSettings = field(default_factory=FileSettings)

    @classmethod
    def of(cls, config):
        return cls(FileSettings(**_given(config, "tensorboard")), WandbSettings(**_given(config, "wandb")),
                   FileSettings(**_given(config, "csv_monitor")))

    @property
    def enabled(self):
        return self.tensorboard.enabled or self.wandb.enabled or self.csv_monitor.enabled


def _given(config, section):
    return {key: value for key, value in (config.get(section) or {}).items() if value != "auto"}
