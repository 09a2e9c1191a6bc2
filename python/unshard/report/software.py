"""Versions of what runs, and packages that are there twice."""
import glob
import os
import pathlib
import platform
import re
import struct
import sys


def software(machine):
    import unshard

    folder = pathlib.Path(unshard.__file__).parent
    torches = packages_called("torch", machine.search_path)
    version, cuda = torch_version(torches[0]) if torches else ("", "")
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', machine.text("/etc/os-release"), re.MULTILINE))
    return {
        "unshard": unshard.__version__, "unshard_folder": str(folder), "compiler": compiler_of(folder),
        "python": platform.python_version(), "python_program": sys.executable,
        "torch": version, "torch_cuda": cuda, "torch_folders": torches,
        "deepspeed_folders": packages_called("deepspeed", machine.search_path),
        "os": release.get("PRETTY_NAME", "unknown"), "kernel": machine.text("/proc/sys/kernel/osrelease", "unknown"),
        "container": machine.path("/.dockerenv").exists() or machine.path("/run/.containerenv").exists(),
        "probe": machine.probe(),
    }


def packages_called(name, search_path):
    """Folders of that package in the order in which Python looks; more than one means that the first hides the others."""
    found = {}
    for folder in search_path:
        path = os.path.join(folder or ".", name)
        if os.path.isfile(os.path.join(path, "__init__.py")):
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def torch_version(folder):
    """(version, CUDA version or "") without importing it."""
    try:
        text = pathlib.Path(folder, "version.py").read_text()
    except OSError:
        return "", ""
    version = re.search(r"^__version__ = '([^']*)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=]*= '([^']*)'", text, re.MULTILINE)
    return version.group(1) if version else "", cuda.group(1) if cuda else ""


def compiler_of(folder):
    """What the engine's library says it was built with, or ""."""
    for file in sorted(glob.glob(os.path.join(folder, "libunshard*.so*")) + glob.glob(os.path.join(folder, "_core*.so"))):
        try:
            words = elf_section(file, b".comment")
        except (OSError, ValueError, struct.error):
            continue
        if words:
            return ", ".join(dict.fromkeys(word.decode(errors="replace") for word in words.split(b"\0") if word))
    return ""


def elf_section(file, name):
    """Bytes of a section of a 64-bit little-endian ELF file; b"" where there is none."""
    with open(file, "rb") as library:
        head = library.read(64)
        if head[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{file} is not a 64-bit little-endian ELF file")
        table, = struct.unpack_from("<Q", head, 40)
        entry, count, names = struct.unpack_from("<HHH", head, 58)
        library.seek(table)
        sections = [struct.unpack("<IIQQQQIIQQ", library.read(entry)[:64]) for _ in range(count)]

        def content(section):
            library.seek(section[4])
            return library.read(section[5])

        titles = content(sections[names])
        for section in sections:
            if titles[section[0]:titles.index(b"\0", section[0])] == name:
                return content(section)
    return b""
