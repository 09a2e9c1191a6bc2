"""Tensors that rest in a file: their place, shape and dtype are known, their bytes are read when asked for, and only those."""
import ctypes
import math
import os

import torch

from unshard.core import CheckpointError


def read_bytes(path, offset, out):
    """Fill the contiguous CPU tensor `out` from the file; CheckpointError if it ends before."""
    left = out.numel() * out.element_size()
    if left == 0:
        return out
    view = memoryview((ctypes.c_ubyte * left).from_address(out.data_ptr())).cast("B")
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            while left:
                got = file.readinto(view[len(view) - left:])
                if not got:
                    raise CheckpointError(f"[checkpoint] {path} ends {left} bytes too early: cut short")
                left -= got
    except OSError as error:
        raise CheckpointError(f"[checkpoint] {path} can't be read: {error.strerror}") from error
    return out


class StoredStorage:
    """`numel` elements of `dtype` from byte `offset` of a file on. dtype None: bytes whose dtype the tensor says."""

    def __init__(self, path, offset, nbytes, dtype):
        self.path, self.offset, self.nbytes, self.dtype = os.fspath(path), offset, nbytes, dtype


class StoredTensor:
    """A tensor in a file."""

    def __init__(self, storage, dtype, start, shape, stride=None):
        self.storage, self.dtype, self.start = storage, dtype, start
        self.shape = torch.Size(shape)
        self.stride = tuple(stride) if stride is not None else contiguous_stride(self.shape)
        if len(self.stride) != len(self.shape) or start < 0 or any(n < 0 for n in (*self.shape, *self.stride)):
            raise CheckpointError(f"[checkpoint] {storage.path}: a tensor of shape {list(shape)}, strides {list(self.stride)} and offset "
                                  f"{start} can't be")
        if self.numel() and (start + self.span()) * dtype.itemsize > storage.nbytes:
            raise CheckpointError(f"[checkpoint] {storage.path}: a tensor of shape {list(self.shape)} from element {start} on reaches "
                                  f"beyond its {storage.nbytes} bytes: damaged, or its values were cut off")

    @staticmethod
    def bytes_of(dtype, shape):
        return math.prod(shape) * dtype.itemsize

    def numel(self):
        return math.prod(self.shape)

    def span(self):
        """Elements of the storage from the first to the last."""
        return 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.stride))

    def is_contiguous(self):
        return self.stride == contiguous_stride(self.shape) or all(
            n == 1 or stride == wanted for n, stride, wanted in zip(self.shape, self.stride, contiguous_stride(self.shape)))

    def place(self):
        """Equal for tensors that are the same memory."""
        return self.storage.path, self.storage.offset, self.start, self.shape, self.stride

    def read(self, begin=0, end=None):
        """Elements [begin, end) of the flattened tensor."""
        end = self.numel() if end is None else end
        if not 0 <= begin <= end <= self.numel():
            raise CheckpointError(f"[checkpoint] {self.storage.path}: elements [{begin}, {end}) of a tensor that has {self.numel()}")
        if not self.is_contiguous():
            return self.load().reshape(-1)[begin:end]
        return self._at(self.start + begin, end - begin)

    def read_into(self, out, begin):
        """Elements from `begin` on into the contiguous `out`, of the same dtype or another."""
        if out.dtype == self.dtype and self.is_contiguous() and 0 <= begin <= self.numel() - out.numel():
            read_bytes(self.storage.path, self.storage.offset + (self.start + begin) * self.dtype.itemsize, out)
        else:
            out.copy_(self.read(begin, begin + out.numel()))

    def load(self):
        """All of it, in its shape and strides."""
        if self.numel() == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.as_strided(self._at(self.start, self.span()), self.shape, self.stride)

    def _at(self, first, count):
        return read_bytes(self.storage.path, self.storage.offset + first * self.dtype.itemsize, torch.empty(count, dtype=self.dtype))


def contiguous_stride(shape):
    stride, step = [], 1
    for n in reversed(shape):
        stride.append(step)
        step *= max(n, 1)
    return tuple(reversed(stride))
