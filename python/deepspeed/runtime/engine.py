"""The engine class under its old path."""
from unshard.engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
