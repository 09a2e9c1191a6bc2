"""The configuration under its old path."""
from unshard import ConfigError as DeepSpeedConfigError
from unshard.config_view import ConfigView


class DeepSpeedConfig(ConfigView):
    """A DeepSpeed JSON, checked and resolved."""

    def __init__(self, config, mpu=None, mesh_device=None):
        super().__init__(config, mpu, mesh_device, deepspeed_defaults=True)


__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]
