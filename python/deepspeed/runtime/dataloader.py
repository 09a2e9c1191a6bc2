"""Loaders under their old path."""
from unshard.data import EngineDataLoader as DeepSpeedDataLoader
from unshard.data import RepeatingLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
