"""Tiled linear layers under their old path."""
from unshard.tiled_linear import TiledLinear, TiledLinearReturnBias

__all__ = ["TiledLinear", "TiledLinearReturnBias"]
