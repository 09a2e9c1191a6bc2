"""Where the facts come from: a root folder with /proc and /sys, the environment, and what can't be read from files.

Everything else of the report is a function of a Machine, so that a made-up one can be given: a folder and a few functions.
"""
import dataclasses
import errno
import fcntl
import json
import os
import pathlib
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping

SIOCGIFCONF = 0x8912


@dataclasses.dataclass
class Machine:
    root: pathlib.Path = pathlib.Path("/")
    environ: Mapping[str, str] = dataclasses.field(default_factory=lambda: os.environ)
    search_path: list = dataclasses.field(default_factory=lambda: list(sys.path))
    resolve: Callable = None           # host name -> [address, ...]; OSError when there is none
    ipv4: Callable = None              # () -> [(interface, address), ...]
    file_system: Callable = None       # path -> (bytes, free bytes), or None
    memfd: Callable = None             # () -> "" when anonymous shared memory can be made, else why not
    run: Callable = None               # argv -> standard output, or None when there is no such program or it failed
    probe: Callable = None             # () -> what importing torch and the engine says; see probe_python

    def __post_init__(self):
        self.root = pathlib.Path(self.root)
        self.resolve = self.resolve or resolve_name
        self.ipv4 = self.ipv4 or ipv4_addresses
        self.file_system = self.file_system or size_of_file_system
        self.memfd = self.memfd or try_memfd
        self.run = self.run or output_of
        self.probe = self.probe or probe_python

    def path(self, path):
        return self.root / path.lstrip("/")

    def text(self, path, default=""):
        """The file's text without the last newline; `default` where it isn't there or can't be read."""
        try:
            return self.path(path).read_text(errors="replace").strip()
        except OSError:
            return default

    def number(self, path):
        try:
            return int(self.text(path), 0)
        except ValueError:
            return None

    def folders(self, path):
        """Names in a folder, sorted; none where it isn't there."""
        try:
            return sorted(os.listdir(self.path(path)))
        except OSError:
            return []


def resolve_name(name):
    """In the order in which Gloo tries them."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except UnicodeError:                                     # too long, or with an empty part
        raise OSError("it isn't a valid host name") from None
    return list(dict.fromkeys(address[0] for *_, address in found))


def ipv4_addresses():
    """[(interface, address)] of this network namespace; the kernel has no file that says so."""
    entry = 40                                               # sizeof(struct ifreq)
    buffer = bytearray(entry * 256)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        pointer = struct.pack("iP", len(buffer), _address_of(buffer))
        try:
            used = struct.unpack("iP", fcntl.ioctl(probe, SIOCGIFCONF, pointer))[0]
        except OSError:                                      # some sandboxes don't have it
            return []
    rows = [bytes(buffer[at:at + entry]) for at in range(0, used, entry)]
    return [(row[:16].split(b"\0")[0].decode().split(":")[0], socket.inet_ntoa(row[20:24])) for row in rows]


def _address_of(buffer):
    import ctypes
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def size_of_file_system(path):
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def try_memfd():
    """What the engine shares memory with."""
    try:
        file = os.memfd_create("unshard-report", os.MFD_CLOEXEC)
    except OSError as error:
        return f"memfd_create: {error.strerror} ({errno.errorcode.get(error.errno, error.errno)})"
    try:
        os.posix_fallocate(file, 0, 1 << 20)
    except OSError as error:
        return f"giving it memory: {error.strerror} ({errno.errorcode.get(error.errno, error.errno)})"
    finally:
        os.close(file)
    return ""


def output_of(argv):
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


_PROBE = """
import json, sys
said = {}
def last_line(error):
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
try:
    import torch
    said["torch"] = torch.__version__
    said["cuda_available"] = torch.cuda.is_available()
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        said["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        import unshard._core
        said["engine"] = unshard._core.__file__
    except Exception as error:
        said["engine_error"] = last_line(error)
except Exception as error:
    said["torch_error"] = last_line(error)
print(json.dumps(said))
"""


def probe_python():
    """In a process of its own: an import that crashes must not end the report."""
    try:
        done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)})
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"torch_error": "importing torch took longer than 120 s"}
    except (OSError, IndexError, ValueError) as error:
        words = done.stderr.strip().splitlines()[-1:] if isinstance(error, (IndexError, ValueError)) else [str(error)]
        return {"torch_error": words[0] if words else f"the process that imports it ended with {done.returncode}"}
