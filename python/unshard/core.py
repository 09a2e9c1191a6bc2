"""The C++ engine: torch first, since the engine's library needs torch's symbols, then the binding."""
import torch  # noqa: F401

from unshard import _core  # noqa: E402
from unshard._core import CheckpointError, CommError, ConfigError

__all__ = ["_core", "CheckpointError", "CommError", "ConfigError"]
