"""The reading side of `encoding`: JSON text and tensors back to the value. Only the constructors listed here are called."""
import base64
import collections
import datetime
import decimal
import enum
import json
import math
import pathlib
import sys
import types
import uuid
import zoneinfo

import torch

from unshard.checkpoint.kinds import DTYPES, FACTORIES, NAMESPACES, PATHS, VIEWED_AS
from unshard.core import CheckpointError
from unshard.tensors import bytes_of


def decode(text, tensors):
    """The value that `encode` made these of. CheckpointError where they don't fit each other or aren't what `encode` writes."""
    decoder = _Decoder(tensors)
    try:
        return decoder.any(json.loads(text, parse_constant=_no_constant))
    except CheckpointError:
        raise
    except RecursionError:
        raise CheckpointError("[checkpoint] encoded state: nested too deeply") from None
    except Exception as error:               # whatever a damaged text makes of a constructor's arguments
        raise CheckpointError(f"[checkpoint] encoded state can't be read: {type(error).__name__}: {error}") from error


def _no_constant(name):
    raise ValueError(f"{name} isn't JSON")


class _Decoder:
    def __init__(self, tensors):
        self.tensors = tensors
        self._made = {}                  # key -> the tensor that was made of it

    def any(self, node):
        if isinstance(node, list):
            return [self.any(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$" not in node:
            return {key: self.any(item) for key, item in node.items()}
        read = _READERS.get(node["$"]) if isinstance(node["$"], str) else None
        if read is None:
            raise CheckpointError(f"[checkpoint] encoded state has a value of kind {node['$']!r}, which this version of unshard doesn't "
                                  "know")
        return read(self, node)

    def items(self, node):
        return [self.any(item) for item in node["items"]]

    def pairs(self, node):
        return [(self.any(key), self.any(item)) for key, item in node["items"]]

    def counter(self, node):
        made = collections.Counter()
        made.update(dict(self.pairs(node)))
        return made

    def default_dict(self, node):
        return collections.defaultdict(node["factory"] and FACTORIES[node["factory"]], self.pairs(node))

    def namespace(self, node):
        made = NAMESPACES[node["module"]]()
        vars(made).update(self.pairs(node))
        return made

    def bytes(self, node):
        cls = {"bytes": bytes, "bytearray": bytearray}[node["$"]]
        return cls(self.raw(node["key"]) if "key" in node else base64.b64decode(node["base64"], validate=True))

    def path(self, node):
        cls = PATHS[node["class"]]
        if issubclass(cls, pathlib.Path) and cls is not type(pathlib.Path()):      # the other system's
            cls = cls.__mro__[2]
        return cls(node["value"])

    def time(self, node):
        cls = {"datetime": datetime.datetime, "time": datetime.time}[node["$"]]
        return cls.fromisoformat(node["value"]).replace(tzinfo=self.any(node["zone"]), fold=node["fold"])

    def timezone(self, node):
        offset = self.any(node["offset"])
        return datetime.timezone(offset) if node["name"] is None else datetime.timezone(offset, node["name"])

    def enum(self, node):
        # Looked up in what is imported, through dictionaries only: nothing is imported and no code of the module runs.
        found = sys.modules.get(node["module"])
        for name in node["class"].split("."):
            found = vars(found).get(name) if isinstance(found, (types.ModuleType, type)) else None
        if isinstance(found, enum.EnumMeta) and node["name"] in found.__members__:
            return found.__members__[node["name"]]
        return self.any(node["value"])

    def stored(self, key):
        if key not in self.tensors:
            raise CheckpointError(f"[checkpoint] encoded state wants tensor {key!r}, which isn't there")
        return self.tensors[key]

    def raw(self, key):
        return bytes_of(self.stored(key))

    def tensor(self, node):
        key, dtype = node["key"], DTYPES[node["dtype"]]
        if key not in self._made:
            data = self.stored(key)
            if data.dtype != VIEWED_AS.get(dtype, dtype):
                raise CheckpointError(f"[checkpoint] tensor {key!r} is stored as {data.dtype}, which is no {dtype}")
            data = torch.view_as_complex(data) if dtype.is_complex else data.view(dtype)
            if list(data.shape) != node["shape"]:
                raise CheckpointError(f"[checkpoint] tensor {key!r} has shape {list(data.shape)}, encoded state says {node['shape']}")
            self._made[key] = data
        data = self._made[key]
        if "parameter" in node:
            return torch.nn.Parameter(data, requires_grad=node["parameter"])
        return data.detach().requires_grad_() if node.get("requires_grad") else data

    def numpy_dtype(self, node):
        numpy = _numpy()
        return numpy.lib.format.descr_to_dtype(self.any(node["descr"]))

    def array(self, node):
        numpy = _numpy()
        dtype = self.numpy_dtype(node["dtype"])
        if dtype.hasobject:
            raise CheckpointError("[checkpoint] encoded state has an array of Python objects")
        made = numpy.frombuffer(bytearray(self.raw(node["key"])), dtype=dtype) if dtype.itemsize else numpy.empty(node["shape"], dtype)
        made = made.reshape(node["shape"])
        return made if node["$"] == "ndarray" else made[()]


def _floats(parts):
    return complex(*map(float.fromhex, parts))


_READERS = {
    "int": lambda d, n: int(n["hex"], 16),
    "float": lambda d, n: {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[n["value"]],
    "complex": lambda d, n: _floats(n["value"]),
    "dict": lambda d, n: dict(d.pairs(n)),
    "tuple": lambda d, n: tuple(d.items(n)),
    "size": lambda d, n: torch.Size(d.items(n)),
    "set": lambda d, n: set(d.items(n)),
    "frozenset": lambda d, n: frozenset(d.items(n)),
    "ordered_dict": lambda d, n: collections.OrderedDict(d.pairs(n)),
    "counter": _Decoder.counter, "default_dict": _Decoder.default_dict,
    "deque": lambda d, n: collections.deque(d.items(n), n["maxlen"]),
    "namespace": _Decoder.namespace, "bytes": _Decoder.bytes, "bytearray": _Decoder.bytes, "path": _Decoder.path,
    "range": lambda d, n: range(*n["value"]),
    "decimal": lambda d, n: decimal.Decimal(n["value"]),
    "uuid": lambda d, n: uuid.UUID(n["value"]),
    "device": lambda d, n: torch.device(n["value"]),
    "dtype": lambda d, n: _all_dtypes()[n["value"]],
    "date": lambda d, n: datetime.date.fromisoformat(n["value"]),
    "datetime": _Decoder.time, "time": _Decoder.time,
    "timedelta": lambda d, n: datetime.timedelta(*n["value"]),
    "timezone": _Decoder.timezone,
    "zone": lambda d, n: zoneinfo.ZoneInfo(n["value"]),
    "enum": _Decoder.enum, "tensor": _Decoder.tensor,
    "numpy_dtype": _Decoder.numpy_dtype, "ndarray": _Decoder.array, "numpy_scalar": _Decoder.array,
}


def _numpy():
    try:
        import numpy
    except ImportError:
        raise CheckpointError("[checkpoint] a NumPy array was saved, and NumPy isn't installed here: pip install numpy") from None
    return numpy


def _all_dtypes():
    return {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
