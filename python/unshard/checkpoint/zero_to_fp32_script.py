#!/usr/bin/env python
"""Makes one fp32 state dict of the checkpoint folder that this file lies in. It stands alone: it needs torch, not unshard or DeepSpeed.

    python zero_to_fp32.py . out                        the newest checkpoint's weights as out/pytorch_model.bin
    python zero_to_fp32.py . out --safe_serialization   as out/model.safetensors, sharded where larger than --max_shard_size

Memory: one tensor at a time, whatever the size of the model. Sizes and headers of all files are checked; each value's checksum is compared
too where unshard is installed.
"""
import argparse
import collections
import contextlib
import ctypes
import io
import json
import math
import os
import pickle
import re
import struct
import sys
import time
import zipfile

import torch

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
           "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
OUTPUT_DTYPE_NAMES = {"float32": torch.float32, "fp32": torch.float32, "float16": torch.float16, "fp16": torch.float16,
                      "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}
_STORAGES = {torch.float64: "DoubleStorage", torch.float32: "FloatStorage", torch.float16: "HalfStorage", torch.bfloat16: "BFloat16Storage",
             torch.int64: "LongStorage", torch.int32: "IntStorage", torch.int16: "ShortStorage", torch.int8: "CharStorage",
             torch.uint8: "ByteStorage", torch.bool: "BoolStorage", torch.complex64: "ComplexFloatStorage",
             torch.complex128: "ComplexDoubleStorage"}


try:                                                  # where it is installed: its checksums, and one class of errors
    from unshard.core import CheckpointError, _core
    crc32c = _core.crc32c
except Exception:                                     # not there, or not for this torch
    crc32c = None

    class CheckpointError(RuntimeError):
        """The folder isn't a checkpoint that can be used; the message names the file and the reason."""


# ---- Reading

def read_into(path, offset, out):
    """Fill the contiguous tensor `out` from a file."""
    left = out.numel() * out.element_size()
    view = memoryview((ctypes.c_ubyte * left).from_address(out.data_ptr())).cast("B") if left else b""
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        while left:
            got = file.readinto(view[len(view) - left:])
            if not got:
                raise CheckpointError(f"{path} ends {left} bytes too early: cut short")
            left -= got
    return out


def read_header(path, wanted_bytes, metadata=None):
    """{name: (dtype, shape, offset in the file)} of a safetensors file, which must have `wanted_bytes`. Fills `metadata`, if given."""
    try:
        size = os.path.getsize(path)
        if size != wanted_bytes:
            raise CheckpointError(f"{path} has {size} bytes, the manifest says {wanted_bytes}: cut short or of another checkpoint")
        with open(path, "rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            if length > size - 8:
                raise CheckpointError(f"{path}: its header of {length} bytes is longer than the file")
            header = json.loads(file.read(length))
        found = {}
        if metadata is not None:
            metadata.update(header.get("__metadata__", {}))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found[name] = (_DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + length + begin)
                if math.prod(entry["shape"]) * found[name][0].itemsize != end - begin or not 0 <= begin <= end <= size - 8 - length:
                    raise CheckpointError(f"{path}: {name!r} lies outside the file or has another size than its shape")
        return found
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
    except Exception as error:
        raise CheckpointError(f"{path} isn't a safetensors file, or is damaged ({type(error).__name__}: {error})") from error


class Checkpoint:
    """A folder save_dir/TAG of unshard's format."""

    def __init__(self, folder):
        self.folder = folder
        path = os.path.join(folder, "manifest.json")
        try:
            with open(path) as file:
                manifest = json.load(file)
            if manifest["format"] != 2:
                raise CheckpointError(f"{path} is of format {manifest['format']}; this script reads format 2: take the one of the unshard "
                                      "that wrote it")
            self.parameters = {parameter["name"]: parameter for parameter in manifest["parameters"]}
            self.shared = manifest.get("shared", {})
            self.files = manifest["files"]
            self.pieces = collections.defaultdict(list)                # (kind, parameter) -> [(begin, end, file, key, crc)]
            for file, record in self.files.items():
                if os.path.basename(file) != file:
                    raise CheckpointError(f"{path} names a file outside of its folder: {file!r}")
                for key, piece in record.get("tensors", {}).items():
                    if piece["parameter"] not in self.parameters:
                        raise CheckpointError(f"{path}: {key!r} of {file} belongs to no parameter")
                    self.pieces[piece["kind"], piece["parameter"]].append(
                        (piece["begin"], piece["end"], file, key, int(piece["crc32c"], 16)))
        except FileNotFoundError:
            raise CheckpointError(f"{folder} holds no manifest.json: not a checkpoint of unshard's, or one that wasn't finished") from None
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error})") from error
        self._headers = {}

    def names(self, exclude_frozen=False):
        """Parameters that are there, in the model's order."""
        return [name for name, parameter in self.parameters.items()
                if not parameter.get("excluded") and not (exclude_frozen and parameter["group"] < 0)]

    def weight(self, name):
        """The whole weight, as exactly as it is stored."""
        kind = "fp32" if ("fp32", name) in self.pieces else "param"
        shape = self.parameters[name]["shape"]
        out, reached = None, 0
        for begin, end, file, key, crc in sorted(self.pieces[kind, name]):
            dtype, stored_shape, offset = self._place(file, key)
            out = torch.empty(math.prod(shape), dtype=dtype) if out is None else out
            if begin != reached or math.prod(stored_shape) != end - begin or dtype != out.dtype or end > out.numel():
                raise CheckpointError(f"{self.folder}: the pieces of {kind}.{name} don't make the whole ({file})")
            part = read_into(os.path.join(self.folder, file), offset, out[begin:end])
            if crc32c is not None and crc32c(part) != crc:
                raise CheckpointError(f"{os.path.join(self.folder, file)}: {key!r} isn't what was saved (its checksum differs)")
            reached = end
        if reached != math.prod(shape):
            raise CheckpointError(f"{self.folder}: {reached} of the {math.prod(shape)} elements of {kind}.{name} are there")
        return (torch.empty(0) if out is None else out).reshape(shape)

    def _place(self, file, key):
        if file not in self._headers:
            self._headers[file] = read_header(os.path.join(self.folder, file), self.files[file]["bytes"])
        if key not in self._headers[file]:
            raise CheckpointError(f"{os.path.join(self.folder, file)} has no {key!r}, which the manifest lists: of another checkpoint")
        return self._headers[file][key]

    def buffers(self):
        """{name: tensor} of the module's persistent buffers."""
        if "state.json" not in self.files:
            return {}
        try:
            with open(os.path.join(self.folder, "state.json")) as file:
                state = json.load(file)
            nodes = state.get("buffers", {})
            wanted = state.get("persistent_buffers", list(nodes))
            return {name: self._buffer(nodes[name]) for name in wanted if nodes[name].get("dtype") in
                    {str(dtype).removeprefix("torch.") for dtype in _NAMES}}
        except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(f"{os.path.join(self.folder, 'state.json')} is damaged ({type(error).__name__}: {error})") from error

    def _buffer(self, node):
        dtype, shape, offset = self._place("state.safetensors", node["key"])
        return read_into(os.path.join(self.folder, "state.safetensors"), offset, torch.empty(shape, dtype=dtype))


def find_folder(checkpoint_dir, tag=None):
    """The folder of `tag`, or of the newest checkpoint, in `checkpoint_dir`; that folder itself will do too."""
    if tag is None:
        if os.path.isfile(os.path.join(checkpoint_dir, "manifest.json")):
            return checkpoint_dir
        latest = os.path.join(checkpoint_dir, "latest")
        if not os.path.isfile(latest):
            raise CheckpointError(f"{checkpoint_dir} has no file 'latest': not a checkpoint folder, or give a tag with -t")
        with open(latest) as file:
            tag = file.read().strip()
    folder = os.path.join(checkpoint_dir, tag)
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder} isn't there")
    return folder


class LazyTensor:
    """A tensor that is read when `contiguous()` asks for it. `same_as`: the one that it is another name of."""

    def __init__(self, shape, load, dtype=torch.float32, same_as=None, keep=None):
        self.shape, self.dtype, self.same_as, self._load, self._keep = torch.Size(shape), dtype, same_as, load, keep

    def numel(self):
        return math.prod(self.shape)

    def contiguous(self):
        return self._load().contiguous()


def output_dtype(dtype):
    """The torch.dtype of a name as bf16 or torch.bfloat16, or of itself."""
    found = OUTPUT_DTYPE_NAMES.get(dtype.lower().removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if found not in OUTPUT_DTYPE_NAMES.values():
        raise ValueError(f"dtype {dtype!r} isn't one of {', '.join(sorted(OUTPUT_DTYPE_NAMES))}")
    return found


def lazy_state_dict(checkpoint, exclude_frozen=False, dtype=torch.float32):
    """{name: LazyTensor} in `dtype`: buffers (those of whole numbers as they are), weights, and tied names."""
    state = {}
    for name, value in checkpoint.buffers().items():
        value = value.to(dtype) if value.is_floating_point() else value
        state[name] = LazyTensor(value.shape, lambda value=value: value, value.dtype)
    for name in checkpoint.names(exclude_frozen):
        state[name] = LazyTensor(checkpoint.parameters[name]["shape"], lambda name=name: checkpoint.weight(name).to(dtype), dtype)
    for alias, name in checkpoint.shared.items():
        if name in state:
            state[alias] = LazyTensor(state[name].shape, state[name].contiguous, state[name].dtype, same_as=state[name])
    return state


# ---- Writing, one tensor at a time

@contextlib.contextmanager
def complete_or_absent(path, sync=True):
    """Another name to write to, which becomes `path` when all of it is on the disk, and is removed when something goes wrong."""
    partial = path + ".partial"
    try:
        yield partial
        if sync:
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        if os.path.exists(partial):
            os.remove(partial)
        raise


def nbytes(tensor):
    return tensor.numel() * tensor.dtype.itemsize


def tensor_bytes(tensor):
    """The bytes of a contiguous CPU tensor, not copied; they keep it alive."""
    count = tensor.numel() * tensor.element_size()
    if count == 0:
        return b""
    array = (ctypes.c_ubyte * count).from_address(tensor.data_ptr())
    array.tensor = tensor
    return memoryview(array).cast("B")


def write_safetensors(path, tensors, metadata=None, progress=lambda name: None):
    """{name: LazyTensor} to a safetensors file."""
    header, offset = {"__metadata__": {"format": "pt", **(metadata or {})}}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, offset + nbytes(tensor)]}
        offset += nbytes(tensor)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with complete_or_absent(path) as partial, open(partial, "wb") as file:     # the file is closed first
        file.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in tensors.items():
            progress(name)
            file.write(tensor_bytes(tensor.contiguous()))


class _Storage:
    def __init__(self, key, tensor):
        self.key, self.tensor = key, tensor


class _Pickler(pickle.Pickler):
    """Pickles tensors and LazyTensors as torch.save does; those that are the same share their storage."""

    def __init__(self, file):
        super().__init__(file, protocol=2)
        self.storages = {}
        self._lazy = {}                                                # id of a tensor -> the LazyTensor of it

    def reducer_override(self, value):
        if isinstance(value, torch.Tensor):
            plain = value.detach()
            value = self._lazy.setdefault(id(value), LazyTensor(plain.shape, lambda: plain.cpu().contiguous(), plain.dtype, keep=value))
        if not isinstance(value, LazyTensor):
            return NotImplemented
        storage = self.storages.setdefault(id(value.same_as or value), _Storage(str(len(self.storages)), value))
        stride = torch.empty(value.shape, device="meta").stride()
        return torch._utils._rebuild_tensor_v2, (storage, 0, tuple(value.shape), stride, False, collections.OrderedDict())

    def persistent_id(self, value):
        if not isinstance(value, _Storage):
            return None
        return "storage", getattr(torch, _STORAGES[value.tensor.dtype]), value.key, "cpu", value.tensor.numel()


def write_torch_file(path, value, renamed=(), progress=lambda name: None, sync=True):
    """What torch.load reads as `value`, in which LazyTensors are tensors.
    `renamed`: [(class, module and name that it is to be pickled under)]."""
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(value)
    text = pickled.getvalue()
    for cls, (module, name) in renamed:                                # protocol 2 names classes in lines of text
        text = text.replace(f"c{cls.__module__}\n{cls.__qualname__}\n".encode(), f"c{module}\n{name}\n".encode())
    with complete_or_absent(path, sync) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", text)
        archive.writestr("archive/byteorder", "little")
        names = {id(tensor): name for name, tensor in value.items()} if isinstance(value, dict) else {}
        for storage in pickler.storages.values():
            progress(names.get(id(storage.tensor), ""))
            _write_member(archive, f"archive/data/{storage.key}", storage.tensor)
        archive.writestr("archive/version", "3\n")


def _write_member(archive, name, tensor):
    """A storage, at a multiple of 64 bytes as torch.load's mmap wants it."""
    large = nbytes(tensor) >= 1 << 31
    info = zipfile.ZipInfo(name)
    begin = archive.fp.tell() + 30 + len(name) + (20 if large else 0) + 4
    padding = -begin % 64
    info.extra = struct.pack("<HH", 0x4246, padding) + b"Z" * padding
    with archive.open(info, "w", force_zip64=large) as member:
        member.write(tensor_bytes(tensor.contiguous()))


# ---- The commands

def parse_size(text):
    """Bytes of "5GB" (thousands), "5GiB" (1024s) or a number."""
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40, "B": 1}
    value = str(text).strip().upper()
    unit = next((unit for unit in sorted(units, key=len, reverse=True) if value.endswith(unit)), "")
    try:
        size = int(float(value[:len(value) - len(unit)]) * units.get(unit, 1))
    except ValueError:
        size = 0
    if size <= 0:
        raise ValueError(f"max_shard_size {text!r} isn't a size such as 5GB")
    return size


def split_into_shards(state, max_shard_size, shared):
    """[[name, ...], ...]: in order, each at most `max_shard_size` (None: no limit) where one tensor alone isn't larger. `shared`: other
    names of a tensor lie with it and take no room, as in a file of torch's."""
    limit = math.inf if max_shard_size is None else parse_size(max_shard_size)
    shards, room, homes = [], 0, {}
    for name, tensor in state.items():
        home = homes.get(id(tensor.same_as or tensor)) if shared else None
        if home is not None:
            home.append(name)
            continue
        if not shards or nbytes(tensor) > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        homes[id(tensor.same_as or tensor)] = shards[-1]
        room -= nbytes(tensor)
    return shards or [[]]


def stored_bytes(tensors, shared):
    """Bytes of tensors in a file; `shared`: each once, whatever names it has."""
    found = {id((tensor.same_as or tensor) if shared else tensor): nbytes(tensor) for tensor in tensors}
    return sum(found.values())


def write_state_dict(state, output_dir, max_shard_size="5GB", safe_serialization=False, metadata=None, progress=None):
    """Write {name: LazyTensor} to a folder: one file, or several with an index. Returns their names. Shards that an earlier run left there
    are removed at the end; this one's, if it fails."""
    stem, suffix = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    shared = not safe_serialization                 # tied weights lie in torch's files once
    os.makedirs(output_dir, exist_ok=True)
    shards = split_into_shards(state, max_shard_size, shared)
    files, weight_map = [], {}
    done, total = 0, stored_bytes(state.values(), shared)
    try:
        for i, shard in enumerate(shards):
            file = f"{stem}.{suffix}" if len(shards) == 1 else f"{stem}-{i + 1:05}-of-{len(shards):05}.{suffix}"
            weight_map.update(dict.fromkeys(shard, file))
            tensors = {name: state[name] for name in shard}
            report = _reporter(progress, done, total, tensors, shared)
            if safe_serialization:
                write_safetensors(os.path.join(output_dir, file), tensors, metadata, report)
            else:
                write_torch_file(os.path.join(output_dir, file), tensors, progress=report)
            files.append(file)
            done += stored_bytes(tensors.values(), shared)
        if len(shards) > 1:
            index = {"metadata": {"total_size": total, **(metadata or {})}, "weight_map": weight_map}
            with complete_or_absent(os.path.join(output_dir, f"{stem}.{suffix}.index.json")) as partial, open(partial, "w") as file:
                json.dump(index, file, indent=2)
            files.append(f"{stem}.{suffix}.index.json")
    except BaseException:
        for file in files:
            os.remove(os.path.join(output_dir, file))
        raise
    ours = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.{suffix}(\.index\.json)?")
    for name in set(filter(ours.fullmatch, os.listdir(output_dir))) - set(files):
        os.remove(os.path.join(output_dir, name))
    return files


def _reporter(progress, done, total, tensors, shared):
    """Tells how many bytes lie before each tensor that is written."""
    if progress is None:
        return lambda name: None
    before, places, counted = done, {}, set()
    for name, tensor in tensors.items():
        places[name] = before
        home = id(tensor.same_as or tensor)
        before += 0 if shared and home in counted else nbytes(tensor)
        counted.add(home)
    return lambda name: progress(places.get(name, done), total, name)


def get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag=None, exclude_frozen_parameters=False, lazy_mode=False):
    """{name: fp32 tensor} of a checkpoint; with lazy_mode, of LazyTensors, whose contiguous() reads them."""
    state = lazy_state_dict(Checkpoint(find_folder(checkpoint_dir, tag)), exclude_frozen_parameters)
    return state if lazy_mode else loaded(state)


def loaded(state):
    """The tensors of a lazy state dict; those that are the same share their memory."""
    made = {}
    for tensor in state.values():
        key = id(tensor.same_as or tensor)
        if key not in made:
            made[key] = tensor.contiguous()
    return {name: made[id(tensor.same_as or tensor)] for name, tensor in state.items()}


def convert_zero_checkpoint_to_state_dict(checkpoint_dir, output_dir, dtype=torch.float32, max_shard_size="5GB", safe_serialization=False,
                                          tag=None, exclude_frozen_parameters=False):
    """Write a checkpoint's weights in `dtype` to `output_dir`: pytorch_model.bin or model.safetensors, sharded where larger."""
    state = lazy_state_dict(Checkpoint(find_folder(checkpoint_dir, tag)), exclude_frozen_parameters, output_dtype(dtype))
    return write_state_dict(state, output_dir, max_shard_size, safe_serialization, progress=_PrintedProgress())


def convert_zero_checkpoint_to_fp32_state_dict(checkpoint_dir, output_dir, max_shard_size="5GB", safe_serialization=False, tag=None,
                                               exclude_frozen_parameters=False):
    """Write a checkpoint's weights in fp32 to `output_dir`."""
    return convert_zero_checkpoint_to_state_dict(checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag,
                                                 exclude_frozen_parameters)


def load_state_dict_from_zero_checkpoint(model, checkpoint_dir, tag=None):
    """Load a checkpoint's weights into a plain model, on the CPU; returns it."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


class _PrintedProgress:
    """A line every few seconds."""

    def __init__(self):
        self._last = time.monotonic()

    def __call__(self, done, total, what):
        if time.monotonic() - self._last > 5:
            self._last = time.monotonic()
            print(f"{done / 1e9:.1f} of {total / 1e9:.1f} GB written: {what}", flush=True)


def main(argv=None, convert=convert_zero_checkpoint_to_state_dict, asks_dtype=False):
    """The command. `convert`: what does it; `asks_dtype`: for zero_to_torch.py, whose weights are of the dtype that is asked for."""
    parser = argparse.ArgumentParser(description=f"Make one state dict of a checkpoint{'' if asks_dtype else ', in fp32'}.")
    parser.add_argument("checkpoint_dir", help="the folder that holds the tags, e.g. path/checkpoint-12")
    parser.add_argument("output_dir", help="where pytorch_model.bin or model.safetensors is put, or their shards")
    if asks_dtype:
        parser.add_argument("--dtype", required=True, choices=sorted(OUTPUT_DTYPE_NAMES), help="of the weights")
    parser.add_argument("--max_shard_size", default="5GB", help="largest file; one tensor alone may be larger (default 5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors, not torch's pickle")
    parser.add_argument("-t", "--tag", help="the checkpoint's tag, e.g. global_step1 (default: what `latest` says)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen parameters out")
    parser.add_argument("-d", "--debug", action="store_true", help="show the whole trace of an error")
    arguments = parser.parse_args(argv)
    try:
        files = convert(arguments.checkpoint_dir, arguments.output_dir, arguments.dtype if asks_dtype else torch.float32,
                        arguments.max_shard_size, arguments.safe_serialization, arguments.tag, arguments.exclude_frozen_parameters)
    except (CheckpointError, ValueError, OSError) as error:
        if arguments.debug:
            raise
        print(f"zero_to_{'torch' if asks_dtype else 'fp32'}: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.output_dir}: {', '.join(files)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
