"""The classes and constants that pickles in checkpoints name, and what is made of each. Whatever isn't here becomes a `Foreign`."""
import argparse
import collections
import datetime
import decimal
import functools
import re
import types
import typing

import torch

from unshard.checkpoint.kinds import PATHS
from unshard.checkpoint.stored_tensor import StoredStorage, StoredTensor
from unshard.core import CheckpointError


class Name(typing.NamedTuple):
    """A class or function as a pickle names it. Never looked up."""
    module: str
    name: str

    def __str__(self):
        return f"{self.module}.{self.name}"


class Foreign:
    """An object of a class that isn't known here: what the file says about it, as data."""

    def __init__(self, name, arguments=()):
        self.name, self.arguments, self.state, self.items = name, arguments, {}, []

    def build(self, state):
        self.state = state if isinstance(state, dict) else {"state": state}

    def __setitem__(self, key, value):
        self.items.append((key, value))

    def append(self, value):
        self.items.append(value)

    def extend(self, values):
        self.items.extend(values)

    def __repr__(self):
        return f"<{self.name}: not known here, kept as data>"


class Built:
    """A value that a BUILD instruction completes: `complete(value, state)` gives it."""

    def __init__(self, value, complete):
        self.value, self._complete = value, complete

    def build(self, state):
        self.value = self._complete(self.value, state)

    def finished(self):
        return self.value


def _check(fits, what):
    if not fits:
        raise CheckpointError(f"[checkpoint] a pickle makes {what} of something else than it is made of")


def _encode(text, how="latin1"):
    _check(isinstance(text, str) and how in ("latin1", "latin-1"), "bytes")       # how older protocols write bytes
    return text.encode("latin1")


def _bytearray(value=b"", how="latin1"):
    return bytearray(_encode(value, how) if isinstance(value, str) else _bytes(value))


def _bytes(value=b""):
    _check(isinstance(value, bytes), "bytes")
    return value


def _with_attributes(cls):
    """A class whose instances are their attributes."""
    def complete(value, state):
        _check(isinstance(state, dict) and all(isinstance(key, str) for key in state), f"a {cls.__name__}")
        vars(value).update(state)
        return value
    return lambda *arguments: Built(cls(), complete)


def _default_dict(factory=None):
    factories = {Name(module, name): made for module in ("builtins", "__builtin__")
                 for name, made in (("list", list), ("dict", dict), ("int", int), ("float", float), ("set", set), ("str", str))}
    _check(factory is None or factory in factories, "a defaultdict")
    return collections.defaultdict(factories.get(factory))


def _object_of(cls, base=None, state=None):
    """copyreg's way to make an object of a Python class."""
    _check(isinstance(cls, Name), "an object")
    return CONSTRUCTORS[cls]() if cls in CONSTRUCTORS else Foreign(cls)


def _storage_tensor(storage, start, shape, stride, requires_grad=False, hooks=None, metadata=None):
    return _stored(storage, storage.dtype if isinstance(storage, StoredStorage) else None, start, shape, stride)


def _storage_tensor_of_dtype(storage, start, shape, stride, requires_grad=False, hooks=None, dtype=None, metadata=None):
    return _stored(storage, dtype, start, shape, stride)


def _stored(storage, dtype, start, shape, stride):
    _check(isinstance(storage, StoredStorage) and isinstance(dtype, torch.dtype), "a tensor")
    _check(type(start) is int and isinstance(shape, tuple) and isinstance(stride, tuple) and all(type(n) is int for n in (*shape, *stride)),
           "a tensor")
    return StoredTensor(storage, dtype, start, shape, stride)


def _parameter(data, requires_grad=True, hooks=None, state=None):
    _check(isinstance(data, StoredTensor), "a parameter")
    return data


def _tensor_with_attributes(make, cls, arguments, state):
    """A tensor that attributes were hung on (torch's _rebuild_from_type_v2): the tensor alone."""
    known = (Name("torch", "Tensor"), Name("torch._tensor", "Tensor"), Name("torch.nn.parameter", "Parameter"))
    _check(cls in known and make in CONSTRUCTORS and isinstance(arguments, tuple), "a tensor")
    return CONSTRUCTORS[make](*arguments)


def _dtype_of_numpy(text, align=False, copy=True):
    import numpy
    _check(isinstance(text, str) and re.fullmatch(r"[<>|=]?[?biufcSUmM]\d{0,6}", text), "a numpy dtype")

    def complete(dtype, state):
        _check(isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">", "|", "="), "a numpy dtype")
        return dtype.newbyteorder(state[1]) if state[1] in "<>" else dtype
    return Built(numpy.dtype(text), complete)


def _array_of_numpy(cls, shape, typecode):
    import numpy

    def complete(_, state):
        _, shape, dtype, fortran, raw = state
        _check(isinstance(dtype, numpy.dtype) and not dtype.hasobject and isinstance(raw, bytes | bytearray), "a numpy array")
        return numpy.frombuffer(bytearray(raw), dtype).reshape(shape, order="F" if fortran else "C")
    return Built(numpy.empty(0), complete)


def _scalar_of_numpy(dtype, raw):
    import numpy
    _check(isinstance(dtype, numpy.dtype) and not dtype.hasobject and isinstance(raw, bytes), "a numpy number")
    return numpy.frombuffer(raw, dtype)[0]


def _small(cls, *kinds):
    """A constructor that takes arguments of these kinds only."""
    def make(*arguments):
        _check(all(isinstance(argument, kinds) for argument in arguments), f"a {cls.__name__}")
        return cls(*arguments)
    return make


# torch's storages, which tensors refer to.
STORAGE_DTYPES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16, "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64, "IntStorage": torch.int32, "ShortStorage": torch.int16, "CharStorage": torch.int8,
    "ByteStorage": torch.uint8, "BoolStorage": torch.bool, "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128, "UntypedStorage": torch.uint8}


def _named(modules, table):
    return {Name(module, name): made for module in modules for name, made in table.items()}


_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

# Constants: pushed as they are.
VALUES = {**_named(["torch"], _DTYPES)}

CONSTRUCTORS = {
    **_named(["builtins", "__builtin__"], {
        "set": _small(set, list, tuple), "frozenset": _small(frozenset, list, tuple), "bytearray": _bytearray, "bytes": _bytes,
        "complex": _small(complex, int, float), "range": _small(range, int), "xrange": _small(range, int),
        "list": _small(list, list, tuple), "dict": _small(dict)}),
    **_named(["collections"], {
        "OrderedDict": _small(collections.OrderedDict, list), "defaultdict": _default_dict, "Counter": _small(collections.Counter, dict),
        "deque": _small(collections.deque, list, tuple, int, type(None))}),
    **_named(["copyreg", "copy_reg"], {"_reconstructor": _object_of}),
    Name("_codecs", "encode"): _encode,
    Name("argparse", "Namespace"): _with_attributes(argparse.Namespace),
    Name("types", "SimpleNamespace"): _with_attributes(types.SimpleNamespace),
    **_named(["datetime"], {
        "datetime": _small(datetime.datetime, bytes, datetime.tzinfo), "date": _small(datetime.date, bytes),
        "time": _small(datetime.time, bytes, datetime.tzinfo), "timedelta": _small(datetime.timedelta, int),
        "timezone": _small(datetime.timezone, datetime.timedelta, str)}),
    Name("decimal", "Decimal"): _small(decimal.Decimal, str),
    **_named(["pathlib", "pathlib._local"], {name: functools.partial(lambda cls, *parts: _small(cls, str)(*parts), cls)
                                             for name, cls in PATHS.items()}),
    **_named(["numpy._core.multiarray", "numpy.core.multiarray"], {"_reconstruct": _array_of_numpy, "scalar": _scalar_of_numpy}),
    Name("numpy", "dtype"): _dtype_of_numpy,
    Name("torch", "Size"): _small(torch.Size, list, tuple),
    Name("torch", "device"): _small(torch.device, str, int),
    **_named(["torch._utils"], {
        "_rebuild_tensor": _storage_tensor, "_rebuild_tensor_v2": _storage_tensor, "_rebuild_tensor_v3": _storage_tensor_of_dtype,
        "_rebuild_parameter": _parameter, "_rebuild_parameter_with_state": _parameter}),
    Name("torch._tensor", "_rebuild_from_type_v2"): _tensor_with_attributes,
    # DeepSpeed's stage: a whole number.
    Name("deepspeed.runtime.zero.config", "ZeroStageEnum"): _small(int, int),
}
