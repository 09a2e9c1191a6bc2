"""OnDevice under its old path."""
from unshard.on_device import OnDevice

__all__ = ["OnDevice"]
