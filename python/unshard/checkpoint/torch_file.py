"""Files of torch.save, read without torch.load: the pickle as data (`safe_pickle`), tensors as places in the file (`StoredTensor`)."""
import io
import os
import struct
import zipfile
import zlib

from unshard.checkpoint.legacy_torch_file import LEGACY_BEGIN, read_legacy_file
from unshard.checkpoint.pickle_classes import STORAGE_DTYPES, Foreign, Name
from unshard.checkpoint.safe_pickle import load
from unshard.checkpoint.stored_tensor import StoredStorage, StoredTensor
from unshard.core import CheckpointError

_LOCAL_HEADER = struct.Struct("<4s22xHH")         # of a zip's member: signature, ..., lengths of name and extra field
_MOST_PICKLE_BYTES = 1 << 30


def read_torch_file(path):
    """What torch.save wrote, with a StoredTensor for each tensor. CheckpointError for anything that is wrong with the file."""
    path = os.fspath(path)
    if _begins_with(path, LEGACY_BEGIN):
        return read_legacy_file(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            if "data.pkl" not in members:
                raise CheckpointError(f"[checkpoint] {path} is a zip file but none of torch.save")
            if members["data.pkl"].file_size > _MOST_PICKLE_BYTES:
                raise CheckpointError(f"[checkpoint] {path}: its pickle of {members['data.pkl'].file_size} bytes is too large to be one")
            pickle = archive.read(members["data.pkl"])
            if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
                raise CheckpointError(f"[checkpoint] {path} was written on a big-endian machine, which isn't supported")
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"[checkpoint] {path} can't be read: {error.strerror or error}") from error
    except Exception as error:                    # zipfile raises a good many kinds for a damaged file
        raise CheckpointError(f"[checkpoint] {path} is no file of torch.save, or it is damaged or cut short ({error})") from error
    storages = {}

    def persistent(id):
        if not (isinstance(id, tuple) and len(id) == 5 and id[0] == "storage" and isinstance(id[1], Name) and isinstance(id[2], str)):
            raise CheckpointError(f"[checkpoint] {path}: refers to something else than a storage: {id!r:.80}")
        if id[2] not in storages:
            storages[id[2]] = _storage(path, members, id[1], id[2])
        return storages[id[2]]

    return load(io.BytesIO(pickle), path, persistent)


def _begins_with(path, wanted):
    try:
        with open(path, "rb") as file:
            return file.read(len(wanted)) == wanted
    except FileNotFoundError:
        raise CheckpointError(f"[checkpoint] {path} isn't there") from None
    except OSError as error:
        raise CheckpointError(f"[checkpoint] {path} can't be read: {error.strerror}") from error


def _storage(path, members, cls, key):
    entry = members.get(f"data/{key}")
    if entry is None or cls.name not in STORAGE_DTYPES:
        raise CheckpointError(f"[checkpoint] {path}: storage {key!r} of class {cls} isn't there")
    if entry.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"[checkpoint] {path}: storage {key!r} is compressed, which torch.save never does")
    return StoredStorage(path, _data_offset(path, entry), entry.file_size, STORAGE_DTYPES[cls.name])


def _data_offset(path, entry):
    with open(path, "rb") as file:
        file.seek(entry.header_offset)
        header = file.read(_LOCAL_HEADER.size)
        if len(header) == _LOCAL_HEADER.size:
            signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
            offset = entry.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
            if signature == b"PK\3\4" and offset + entry.file_size <= os.fstat(file.fileno()).st_size:
                return offset
    raise CheckpointError(f"[checkpoint] {path}: {entry.filename} lies outside the file: damaged or cut short")


def verify_torch_file(path):
    """Read everything and compare the zip's checksums; returns the bytes read. Torch's older format has none."""
    total = 0
    if _begins_with(path, LEGACY_BEGIN):
        read_legacy_file(os.fspath(path))
        return os.path.getsize(path)
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                crc = 0
                with archive.open(entry) as member:
                    while block := member.read(1 << 22):
                        crc = zlib.crc32(block, crc)
                        total += len(block)
                if crc != entry.CRC:
                    raise CheckpointError(f"[checkpoint] {path}: {entry.filename} isn't what was written (checksum)")
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"[checkpoint] {path} is damaged or cut short: {error}") from error
    return total


def loaded(value, made=None):
    """`value` with its tensors read into memory; those that are the same memory in the file become one."""
    made = {} if made is None else made
    if isinstance(value, StoredTensor):
        if value.place() not in made:
            made[value.place()] = value.load()
        return made[value.place()]
    if isinstance(value, dict):
        copy = value.copy()
        for key, item in value.items():
            copy[key] = loaded(item, made)
        return copy
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(loaded(item, made) for item in value)
    return value


def foreign_places(value, place=""):
    """Where in `value` objects of unknown classes lie: [(place, Foreign)]."""
    if isinstance(value, Foreign):
        return [(place, value)]
    if isinstance(value, dict):
        return [found for key, item in value.items() for found in foreign_places(item, f"{place}[{key!r}]")]
    if isinstance(value, list | tuple | set | frozenset):
        return [found for i, item in enumerate(value) for found in foreign_places(item, f"{place}[{i}]")]
    if type(value).__name__ in ("Namespace", "SimpleNamespace"):
        return foreign_places(vars(value), place)
    return []
