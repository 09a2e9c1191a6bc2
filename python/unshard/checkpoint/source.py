"""What a checkpoint is read through, whatever wrote it: a table of its contents, and any range of any value."""
import contextlib
import json
import math
import typing

import torch

from unshard.core import CheckpointError

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@contextlib.contextmanager
def reading(origin):
    """What isn't of the form that is expected in it is a CheckpointError, whatever Python says of it."""
    try:
        yield
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        raise CheckpointError(f"[checkpoint] {origin} isn't of the form of a checkpoint ({type(error).__name__}: {error})") from error


class Piece(typing.NamedTuple):
    """Elements [begin, end) of a value lie in `tensor` (a StoredTensor) from its element `start` on."""
    begin: int
    end: int
    tensor: object
    start: int = 0


class Source:
    """A checkpoint. Values are named by kind ("param" in the compute dtype, "fp32" for masters, "exp_avg", ...) and parameter.

    contents    dict as in the native manifest.json without "files"; each of "parameters" has its "kinds"
    origin      the folder, for messages
    writer      who wrote it, in words
    """

    def __init__(self, origin, writer, contents, pieces):
        self.origin, self.writer, self.contents = str(origin), writer, contents
        self.pieces = {key: sorted(found, key=lambda piece: piece.begin) for key, found in pieces.items()}
        self.parameters = {parameter["name"]: parameter for parameter in contents["parameters"]}
        # Other names of what was left out go with it.
        contents["shared"] = {alias: name for alias, name in contents.get("shared", {}).items() if name in self.parameters}
        for parameter in contents["parameters"]:
            parameter["kinds"] = []
        for kind, name in self.pieces:
            self._check_cover(kind, name)
            self.parameters[name]["kinds"].append(kind)
        json.dumps(contents)                 # which is how the engine takes them

    def _check_cover(self, kind, name):
        """The pieces of a value are all of it, each element once."""
        if name not in self.parameters:
            raise CheckpointError(f"[checkpoint] {self.origin}: '{kind}.{name}' belongs to no parameter")
        reached = 0
        for piece in self.pieces[kind, name]:
            if piece.begin != reached or piece.start + piece.end - piece.begin > piece.tensor.numel():
                raise CheckpointError(f"[checkpoint] {self.origin}: elements from {reached} on of '{kind}.{name}' are "
                                      f"{'missing' if piece.begin >= reached else 'there twice'} ({piece.tensor.storage.path})")
            reached = piece.end
        if reached != self.numel(name):
            raise CheckpointError(f"[checkpoint] {self.origin}: '{kind}.{name}' has {reached} of its {self.numel(name)} elements")

    @property
    def shared(self):
        """{other name of a tied parameter: the one it is stored under}."""
        return self.contents["shared"]

    def shape(self, name):
        return torch.Size(self.parameters[name]["shape"])

    def numel(self, name):
        return math.prod(self.parameters[name]["shape"])

    def value_kind(self, name):
        """The most exact kind that is stored of the weight itself; None: it was left out."""
        kinds = self.parameters[name]["kinds"]
        return "fp32" if "fp32" in kinds else "param" if "param" in kinds else None

    def dtype(self, kind, name):
        """Of the stored value."""
        return self.pieces[kind, name][0].tensor.dtype if self.pieces[kind, name] else torch.float32

    def compute_dtype(self, name):
        return DTYPES.get(self.parameters[name].get("dtype"), torch.float32)

    def read(self, kind, name, begin=0, end=None):
        """Elements [begin, end) of a flattened value, on the CPU, in the dtype that is stored."""
        end = self.numel(name) if end is None else end
        if (kind, name) not in self.pieces:
            raise CheckpointError(f"[checkpoint] {self.origin} has no '{kind}' of '{name}'; it has {self.parameters[name]['kinds']}")
        if not 0 <= begin <= end <= self.numel(name):
            raise CheckpointError(f"[checkpoint] {self.origin}: elements [{begin}, {end}) of '{name}', which has {self.numel(name)}")
        out = torch.empty(end - begin, dtype=self.dtype(kind, name))
        for piece in self.pieces[kind, name]:
            first, last = max(begin, piece.begin), min(end, piece.end)
            if first < last:
                piece.tensor.read_into(out[first - begin:last - begin], piece.start + first - piece.begin)
        return out

    def names(self, exclude_frozen=False):
        """Parameters whose values are here, in the order of the module."""
        return [name for name, parameter in self.parameters.items()
                if self.value_kind(name) is not None and not (exclude_frozen and parameter["group"] < 0)]

    def buffers(self):
        """{name: tensor} of the module's persistent buffers."""
        state = self.python_state()
        buffers = state.get("buffers", {})
        return {name: buffers[name] for name in state.get("persistent_buffers", buffers)}

    def weight(self, name):
        """The whole weight in its shape, as exactly as it is stored."""
        return self.read(self.value_kind(name), name).reshape(self.shape(name))

    def python_state(self):
        """What is Python's: {"buffers": {name: tensor}, "client_state": {...}, "lr_scheduler": state dict or None, ...}."""
        return {"buffers": {}, "client_state": {}, "lr_scheduler": None}

    def files(self):
        """The paths that it consists of."""
        return sorted({piece.tensor.storage.path for found in self.pieces.values() for piece in found})

    def verify(self, progress=lambda done, total, what: None):
        """Read everything and compare checksums where there are some; CheckpointError naming the first thing that is wrong."""
        raise NotImplementedError
