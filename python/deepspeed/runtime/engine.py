"""The engine class under its old path."""
from unshard.engine import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
