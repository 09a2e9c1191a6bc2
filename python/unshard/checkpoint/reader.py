"""Our own format from Python, without an engine: manifest.json, the ranks' safetensors files, state.json."""
import json
import os

import torch

from unshard.checkpoint.encoding import decode
from unshard.checkpoint.source import Piece, Source, reading
from unshard.checkpoint.stored_tensor import StoredStorage, StoredTensor, read_bytes
from unshard.checkpoint.zero_to_fp32_script import read_header
from unshard.core import CheckpointError, _core

MANIFEST, STATE, STATE_TENSORS = "manifest.json", "state.json", "state.safetensors"
FORMAT = 2


def is_native_folder(folder):
    return os.path.isfile(os.path.join(folder, MANIFEST))


class NativeSource(Source):
    """A folder save_dir/TAG. Sizes and headers of all files are checked at once, checksums by `verify` and `read(..., check=True)`."""

    def __init__(self, folder):
        self.folder = os.fspath(folder)
        manifest = _read_manifest(os.path.join(self.folder, MANIFEST))
        with reading(f"{self.folder}/{MANIFEST}"):
            self._files = manifest.pop("files")
            self._check_files()
            pieces = self._pieces()
            super().__init__(self.folder, f"unshard {manifest.get('unshard_version', '?')}", manifest, pieces)

    def _check_files(self):
        for name, record in self._files.items():
            path = os.path.join(self.folder, name)
            if os.path.basename(name) != name:
                raise CheckpointError(f"[checkpoint] {self.folder}/{MANIFEST} names a file outside of its folder: {name!r}")
            size = os.path.getsize(path) if os.path.isfile(path) else None
            if size != record["bytes"]:
                raise CheckpointError(f"[checkpoint] {path} " + ("isn't there" if size is None else
                                      f"has {size} bytes, the manifest says {record['bytes']}: cut short or of another checkpoint"))

    def _pieces(self):
        pieces, self._checksums = {}, {}
        for file, record in self._files.items():
            if "tensors" not in record:
                continue
            path = os.path.join(self.folder, file)
            header = read_header(path, record["bytes"])
            for key, entry in record["tensors"].items():
                if key not in header:
                    raise CheckpointError(f"[checkpoint] {path} has no {key!r}, which the manifest lists: of another checkpoint")
                dtype, shape, offset = header[key]
                numel = torch.Size(shape).numel()
                tensor = StoredTensor(StoredStorage(path, offset, numel * dtype.itemsize, dtype), dtype, 0, (numel,))
                if numel != entry["end"] - entry["begin"]:
                    raise CheckpointError(f"[checkpoint] {path}: {key!r} has {numel} elements, the manifest says "
                                          f"{entry['end'] - entry['begin']}")
                pieces.setdefault((entry["kind"], entry["parameter"]), []).append(Piece(entry["begin"], entry["end"], tensor))
                self._checksums[path, key] = int(entry["crc32c"], 16), tensor
        return pieces

    def python_state(self):
        """What was given to the engine to keep, decoded; {} where there is none."""
        if STATE not in self._files:
            return {"buffers": {}, "client_state": {}, "lr_scheduler": None}
        self._check_whole(STATE)
        with open(os.path.join(self.folder, STATE), encoding="utf-8", errors="strict") as file:
            text = file.read()
        tensors = {}
        if STATE_TENSORS in self._files:
            self._check_whole(STATE_TENSORS)
            path = os.path.join(self.folder, STATE_TENSORS)
            for key, (dtype, shape, offset) in read_header(path, self._files[STATE_TENSORS]["bytes"]).items():
                tensors[key] = read_bytes(path, offset, torch.empty(shape, dtype=dtype))
        return decode(text, tensors)

    def _check_whole(self, name):
        path, record = os.path.join(self.folder, name), self._files[name]
        data = read_bytes(path, 0, torch.empty(record["bytes"], dtype=torch.uint8))
        if "crc32c" in record and _core.crc32c(data) != int(record["crc32c"], 16):
            raise CheckpointError(f"[checkpoint] {path} isn't what was saved (its checksum differs)")

    def files(self):
        return sorted(os.path.join(self.folder, name) for name in (MANIFEST, *self._files))

    def verify(self, progress=lambda done, total, what: None):
        total = sum(tensor.storage.nbytes for _, tensor in self._checksums.values())
        done = 0
        for name, record in self._files.items():
            if "tensors" not in record:
                self._check_whole(name)
        for (path, key), (wanted, tensor) in self._checksums.items():
            progress(done, total, key)
            if _core.crc32c(tensor.load()) != wanted:
                raise CheckpointError(f"[checkpoint] {path}: {key!r} isn't what was saved (its checksum differs)")
            done += tensor.storage.nbytes
        progress(total, total, "")


def _read_manifest(path):
    try:
        with open(path, encoding="utf-8") as file:
            manifest = json.load(file)
    except FileNotFoundError:
        raise CheckpointError(f"[checkpoint] {os.path.dirname(path)} holds no {MANIFEST}: not a checkpoint, or one that wasn't "
                              "finished") from None
    except OSError as error:
        raise CheckpointError(f"[checkpoint] {path} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"[checkpoint] {path} isn't JSON: damaged or cut short ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise CheckpointError(f"[checkpoint] {path} is of format {found!r}; this version reads format {FORMAT}")
    return manifest
