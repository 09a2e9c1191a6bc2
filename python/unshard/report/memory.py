"""Memory, what may be shared of it, and the limits on processes."""
import re

from unshard.report.processor import control_groups

_LIMITS = {"Max open files": "open_files", "Max locked memory": "locked_memory", "Max address space": "address_space",
           "Max processes": "processes"}


def memory(machine):
    info = dict(re.findall(r"^(\w+):\s+(\d+) kB$", machine.text("/proc/meminfo"), re.MULTILINE))
    size = machine.file_system("/dev/shm")
    return {
        "total_bytes": int(info.get("MemTotal", 0)) * 1024,
        "available_bytes": int(info.get("MemAvailable", 0)) * 1024,
        "limit_bytes": memory_limit(machine),
        "memfd_error": machine.memfd(),
        "dev_shm_bytes": size[0] if size else None,
        "dev_shm_free_bytes": size[1] if size else None,
        "limits": limits(machine),
    }


def memory_limit(machine):
    """Bytes that the control group grants, or None without a limit."""
    found = [machine.number(f"{folder}/memory.max") for folder in control_groups(machine)]
    found.append(machine.number("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
    return min((bytes for bytes in found if bytes and bytes < 1 << 60), default=None)      # version 1 says "none" with a huge number


def limits(machine):
    """{name: [soft, hard]}, None meaning unlimited."""
    found = {}
    for line in machine.text("/proc/self/limits").splitlines():
        for title, name in _LIMITS.items():
            if line.startswith(title):
                found[name] = [None if word == "unlimited" else int(word) for word in line[len(title):].split()[:2]]
    return found
