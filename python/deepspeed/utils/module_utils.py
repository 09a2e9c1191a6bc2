"""Modules by their names."""
from unshard.nested_attributes import recursive_getattr, recursive_setattr

__all__ = ["recursive_getattr", "recursive_setattr"]
