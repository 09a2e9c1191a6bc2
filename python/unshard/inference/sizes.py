"""Amounts of memory as people write them, and where packed weights are kept."""
import os
import pathlib
import re

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(value):
    """An int, or "2G", "1.5 GiB", "800MB": powers of 1024. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?\s*", value.upper()) if isinstance(value, str) else None
    if not found:
        raise ValueError(f"{value!r}: an amount of memory is wanted, such as 2G, 1.5G, 800M, or bytes")
    return int(float(found[1]) * _UNITS[found[2]])


def weight_cache():
    """The folder for weights that are packed into files (weight_memory), unless another is named."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return str(pathlib.Path(base) / "unshard" / "weights")
