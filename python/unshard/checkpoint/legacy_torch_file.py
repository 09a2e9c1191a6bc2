"""torch.save's format from before zip files, which DeepSpeed writes where checkpoint.checkpoint_serialization is false: four pickles (a
magic number, the protocol, the machine, the value), one of the storages' names, then each storage: its length and its bytes."""
import os
import struct

from unshard.checkpoint.pickle_classes import STORAGE_DTYPES, Name
from unshard.checkpoint.safe_pickle import load
from unshard.checkpoint.stored_tensor import StoredStorage
from unshard.core import CheckpointError

LEGACY_BEGIN = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")          # the pickle of the magic number
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001


def read_legacy_file(path):
    """As read_torch_file."""
    storages = {}

    def persistent(id):
        kinds = (str, Name, str, str, int)
        if not (isinstance(id, tuple) and len(id) == 6 and all(map(isinstance, id, kinds)) and id[0] == "storage" and id[4] >= 0):
            raise CheckpointError(f"[checkpoint] {path}: refers to something else than a storage: {id!r:.80}")
        if id[5] is not None or id[1].name not in STORAGE_DTYPES:
            raise CheckpointError(f"[checkpoint] {path}: storage {id[2]!r} of class {id[1]} isn't one that is known")
        dtype = STORAGE_DTYPES[id[1].name]
        return storages.setdefault(id[2], StoredStorage(path, 0, id[4] * dtype.itemsize, dtype))

    try:
        with open(path, "rb") as file:
            magic, protocol, system = (load(file, path) for _ in range(3))
            if magic != _MAGIC or protocol != _PROTOCOL or not isinstance(system, dict) or not system.get("little_endian"):
                raise CheckpointError(f"[checkpoint] {path} is no file of torch.save, or of a machine of another byte order")
            value = load(file, path, persistent)
            keys = load(file, path)
            _place(path, file, keys, storages)
    except OSError as error:
        raise CheckpointError(f"[checkpoint] {path} can't be read: {error.strerror or error}") from error
    return value


def _place(path, file, keys, storages):
    """Where in the file each storage lies."""
    size = os.fstat(file.fileno()).st_size
    if not isinstance(keys, list) or not set(storages) <= set(filter(lambda key: isinstance(key, str), keys)):
        raise CheckpointError(f"[checkpoint] {path}: its list of storages doesn't fit what it refers to")
    offset = file.tell()
    for key in keys:
        file.seek(offset)
        head = file.read(8)
        storage = storages.get(key)
        if storage is None or len(head) < 8 or struct.unpack("<q", head)[0] * storage.dtype.itemsize != storage.nbytes:
            raise CheckpointError(f"[checkpoint] {path}: storage {key!r} isn't what is said of it: damaged or cut short")
        storage.offset = offset + 8
        offset += 8 + storage.nbytes
        if offset > size:
            raise CheckpointError(f"[checkpoint] {path} ends {offset - size} bytes too early: cut short")
