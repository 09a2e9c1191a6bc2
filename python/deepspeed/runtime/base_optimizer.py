"""The class of the optimizers that an engine returns, under its old path."""
from unshard.optimizer import EngineOptimizer as DeepSpeedOptimizer

ZeROOptimizer = DeepSpeedOptimizer

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]
