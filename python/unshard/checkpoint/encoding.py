"""Python values as JSON text and tensors, without pickle: the same value comes back, and reading runs nothing.

    text, tensors = encode({"step": 3, "weights": torch.ones(2)})
    value = decode(text, tensors)

None, bool, finite floats, ints, str, lists and dicts with str keys are themselves in JSON. Everything else is an object with the key "$",
which names its kind. Tensors and arrays are entries of `tensors`, which safetensors can hold: contiguous, on the CPU, of its dtypes, no two
over the same memory. Two tensors that are the same piece of memory are one entry and share memory again when decoded; a piece of a larger
tensor is written as that piece only. Lists, dicts and sets that are referred to twice become two.

A member of an Enum comes back as that member where its class has already been imported, as its value otherwise.
"""
import argparse
import base64
import collections
import datetime
import decimal
import enum
import json
import math
import sys
import types
import uuid
import zoneinfo

import torch

from unshard.checkpoint.decoding import decode
from unshard.checkpoint.kinds import DTYPES, FACTORIES, PATHS, VIEWED_AS

__all__ = ["encode", "decode"]

_MAX_DEPTH = 100
_INLINE_BYTES = 4096                     # longer ones are tensors
_JSON_INT = 1 << 63                      # larger ints are written in hexadecimal: other readers of JSON take 64 bits, Python's 4300 digits


def encode(value, name="value"):
    """The JSON text and {key: tensor} of `value`; `name` is what errors call it. The tensors may share the memory of the caller's.

    Raises TypeError for an object of another class and ValueError for one that holds itself; both say where it lies."""
    encoder = _Encoder(name)
    return json.dumps(encoder.any(value, ()), allow_nan=False), encoder.tensors


class _Encoder:
    def __init__(self, name):
        self.name = name
        self.tensors = {}
        self._open = set()               # ids of the containers on the way to the present value
        self._keys = {}                  # (memory, layout) of a tensor -> its key
        self._owners = {}                # storage -> the caller's tensor, held so that its address names it

    def any(self, value, path):
        write = _WRITERS.get(type(value))
        if write is None and isinstance(value, enum.Enum):
            write = _Encoder.enum
        if write is None and "numpy" in sys.modules:
            write = self._numpy_writer(value)
        if write is None:
            raise TypeError(f"[checkpoint] {self.place(path)} is a {_class_name(type(value))}, which a checkpoint can't hold; "
                            f"{_advice(value)}")
        return write(self, value, path)

    def place(self, path):
        return self.name + "".join(f"[{part!r}]" if len(repr(part)) < 80 else "[...]" for part in path)

    def inside(self, value, path):
        """Entered for everything that holds other values."""
        if id(value) in self._open:
            raise ValueError(f"[checkpoint] {self.place(path)} holds itself; a checkpoint keeps trees: leave the reference back out")
        if len(path) >= _MAX_DEPTH:
            raise ValueError(f"[checkpoint] {self.place(path[:3])}... is nested more than {_MAX_DEPTH} deep")
        return _Open(self._open, id(value))

    def items(self, values, path):
        return [self.any(item, (*path, i)) for i, item in enumerate(values)]

    def pairs(self, mapping, path):
        return [[self.any(key, (*path, f"key {key!r}")), self.any(item, (*path, key))] for key, item in mapping.items()]

    def itself(self, value, path):
        return value

    def int(self, value, path):
        return value if -_JSON_INT <= value < _JSON_INT else {"$": "int", "hex": hex(value)}

    def float(self, value, path):
        return value if math.isfinite(value) else {"$": "float", "value": str(value)}

    def list(self, value, path):
        with self.inside(value, path):
            return self.items(value, path)

    def dict(self, value, path):
        with self.inside(value, path):
            if "$" not in value and all(type(key) is str for key in value):
                return {key: self.any(item, (*path, key)) for key, item in value.items()}
            return {"$": "dict", "items": self.pairs(value, path)}

    def sequence(self, value, path):
        tag = {torch.Size: "size"}.get(type(value), type(value).__name__)
        with self.inside(value, path):
            return {"$": tag, "items": self.items(value, path)}

    def set(self, value, path):
        with self.inside(value, path):   # sorted, so that equal sets are equal texts
            items = sorted((self.any(item, (*path, item)) for item in value), key=lambda item: json.dumps(item, sort_keys=True))
            return {"$": type(value).__name__, "items": items}

    def mapping(self, value, path):
        tag = {collections.OrderedDict: "ordered_dict", collections.Counter: "counter"}[type(value)]
        with self.inside(value, path):
            return {"$": tag, "items": self.pairs(value, path)}

    def default_dict(self, value, path):
        factory = value.default_factory
        if factory is not None and FACTORIES.get(getattr(factory, "__name__", None)) is not factory:
            raise TypeError(f"[checkpoint] {self.place(path)} is a defaultdict that makes its values with {factory!r}, which a checkpoint "
                            f"can't hold; save dict(...) of it, or use one of {', '.join(sorted(FACTORIES))}")
        with self.inside(value, path):
            return {"$": "default_dict", "factory": factory and factory.__name__, "items": self.pairs(value, path)}

    def deque(self, value, path):
        with self.inside(value, path):
            return {"$": "deque", "maxlen": value.maxlen, "items": self.items(value, path)}

    def namespace(self, value, path):
        with self.inside(value, path):
            return {"$": "namespace", "module": type(value).__module__, "items": self.pairs(vars(value), path)}

    def bytes(self, value, path):
        if len(value) > _INLINE_BYTES:
            key = self.store(torch.frombuffer(bytearray(value), dtype=torch.uint8), path)
            return {"$": type(value).__name__, "key": key}
        return {"$": type(value).__name__, "base64": base64.b64encode(value).decode()}

    def text(self, value, path):
        tag, make = {range: ("range", lambda v: [v.start, v.stop, v.step]), complex: ("complex", lambda v: [v.real.hex(), v.imag.hex()]),
                     decimal.Decimal: ("decimal", str), uuid.UUID: ("uuid", str), torch.device: ("device", str),
                     torch.dtype: ("dtype", lambda v: str(v).removeprefix("torch.")),
                     datetime.date: ("date", datetime.date.isoformat),
                     datetime.timedelta: ("timedelta", lambda v: [v.days, v.seconds, v.microseconds]),
                     zoneinfo.ZoneInfo: ("zone", lambda v: v.key)}[type(value)]
        return {"$": tag, "value": make(value)}

    def path(self, value, path):
        return {"$": "path", "class": type(value).__name__, "value": str(value)}

    def time(self, value, path):
        return {"$": type(value).__name__, "value": value.replace(tzinfo=None, fold=0).isoformat(), "fold": value.fold,
                "zone": self.any(value.tzinfo, (*path, "tzinfo"))}

    def timezone(self, value, path):
        _, offset, *name = (None, *value.__getinitargs__())
        return {"$": "timezone", "offset": self.text(offset, path), "name": name[0] if name else None}

    def enum(self, value, path):
        if value.name not in type(value).__members__:
            raise TypeError(f"[checkpoint] {self.place(path)} is {value!r}, a combination of flags, which a checkpoint can't hold; "
                            "save its .value")
        with self.inside(value, path):
            return {"$": "enum", "module": type(value).__module__, "class": type(value).__qualname__, "name": value.name,
                    "value": self.any(value.value, (*path, "value"))}

    def tensor(self, value, path):
        if value.layout != torch.strided or value.is_nested or value.is_quantized or value.is_meta or value.dtype not in DTYPES.values():
            kind = "meta" if value.is_meta else f"{value.layout}, {value.dtype}"
            raise TypeError(f"[checkpoint] {self.place(path)} is a tensor of a kind that a checkpoint can't hold ({kind}); "
                            "save a dense one (.to_dense(), .dequantize())")
        entry = {"$": "tensor", "key": self.tensor_key(value, path), "dtype": str(value.dtype).removeprefix("torch."),
                 "shape": list(value.shape)}
        if isinstance(value, torch.nn.Parameter):
            entry["parameter"] = value.requires_grad
        elif value.requires_grad and value.is_leaf:
            entry["requires_grad"] = True
        return entry

    def tensor_key(self, value, path):
        own = value.detach()
        identity = (own.untyped_storage()._cdata, own.storage_offset(), own.shape, own.stride(), own.dtype, own.is_conj(), own.is_neg())
        if identity not in self._keys:
            data = own.resolve_conj().resolve_neg().to("cpu").contiguous()
            data = torch.view_as_real(data) if data.is_complex() else data.view(VIEWED_AS.get(data.dtype, data.dtype))
            if data.untyped_storage()._cdata in self._owners or isinstance(value, torch.nn.Parameter):
                # A piece of something that is written already; or what may be partitioned, whose memory is there only while it is touched.
                data = data.clone()
            self._owners[own.untyped_storage()._cdata] = own
            self._owners[data.untyped_storage()._cdata] = data
            self._keys[identity] = self.store(data, path)
        return self._keys[identity]

    def store(self, data, path):
        base = "/".join(str(part)[:80] for part in path).encode(errors="replace").decode() or "value"
        key = base
        number = 2
        while key in self.tensors or key == "__metadata__":
            key, number = f"{base}#{number}", number + 1
        self.tensors[key] = data
        return key

    def _numpy_writer(self, value):
        numpy = sys.modules["numpy"]
        if type(value) is numpy.ndarray:
            return _Encoder.array
        if isinstance(value, numpy.generic):
            return _Encoder.array
        return _Encoder.numpy_dtype if isinstance(value, numpy.dtype) else None

    def numpy_dtype(self, value, path):
        if value.hasobject:
            raise TypeError(f"[checkpoint] {self.place(path)} is a numpy array of Python objects, which a checkpoint can't hold; "
                            "save a list (.tolist())")
        descr = sys.modules["numpy"].lib.format.dtype_to_descr(value)
        return {"$": "numpy_dtype", "descr": self.any(descr, path)}

    def array(self, value, path):
        numpy = sys.modules["numpy"]
        data = numpy.ascontiguousarray(value)
        raw = torch.frombuffer(bytearray(data.tobytes()), dtype=torch.uint8) if data.nbytes else torch.empty(0, dtype=torch.uint8)
        tag = "ndarray" if type(value) is numpy.ndarray else "numpy_scalar"
        return {"$": tag, "dtype": self.numpy_dtype(value.dtype, path), "shape": list(value.shape), "key": self.store(raw, path)}


class _Open:
    """A container is open while its parts are encoded."""

    def __init__(self, open_ids, id):
        self._open_ids, self._id = open_ids, id

    def __enter__(self):
        self._open_ids.add(self._id)

    def __exit__(self, *error):
        self._open_ids.discard(self._id)


_WRITERS = {
    type(None): _Encoder.itself, bool: _Encoder.itself, str: _Encoder.itself, int: _Encoder.int, float: _Encoder.float,
    list: _Encoder.list, dict: _Encoder.dict, tuple: _Encoder.sequence, torch.Size: _Encoder.sequence, set: _Encoder.set,
    frozenset: _Encoder.set, bytes: _Encoder.bytes, bytearray: _Encoder.bytes, collections.OrderedDict: _Encoder.mapping,
    collections.Counter: _Encoder.mapping, collections.defaultdict: _Encoder.default_dict, collections.deque: _Encoder.deque,
    argparse.Namespace: _Encoder.namespace, types.SimpleNamespace: _Encoder.namespace, torch.Tensor: _Encoder.tensor,
    torch.nn.Parameter: _Encoder.tensor,
    datetime.datetime: _Encoder.time, datetime.time: _Encoder.time, datetime.timezone: _Encoder.timezone,
    **dict.fromkeys(PATHS.values(), _Encoder.path),
    **dict.fromkeys((range, complex, decimal.Decimal, uuid.UUID, torch.device, torch.dtype, datetime.date, datetime.timedelta,
                     zoneinfo.ZoneInfo), _Encoder.text),
}


def _class_name(cls):
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _advice(value):
    """What to do about an object that can't be encoded."""
    for base, way in ((bool, "bool"), (int, "int"), (float, "float"), (str, "str"), (bytes, "bytes"), (tuple, "tuple"), (list, "list"),
                      (dict, "dict"), (set, "set")):
        if isinstance(value, base):
            return f"save {way}(...) of it"
    if isinstance(value, torch.Tensor):
        return "save a plain tensor of it"
    if isinstance(value, torch.Generator):
        return "save its .get_state()"
    if hasattr(type(value), "__dataclass_fields__"):
        return "save dataclasses.asdict(...) of it"
    if hasattr(value, "state_dict"):
        return "save its .state_dict()"
    return "save the numbers, text, tensors, lists and dicts that describe it"
