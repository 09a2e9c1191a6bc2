"""How many cores there are, and which rank gets which."""
import os
import re

from unshard.launcher.errors import LaunchError


def usable_cores():
    """The cores this process may use: its affinity, cut to the CPU quota of its control group."""
    cores = sorted(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        if quota != "max":
            cores = cores[:max(1, int(quota) // int(period))]
    except (OSError, ValueError):
        pass
    return cores


def parse_core_list(text):
    """'0-3,8' -> [0, 1, 2, 3, 8]"""
    cores = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not match:
            raise LaunchError(f"--bind_core_list: '{part}' is not a core or a range of cores such as 0-3")
        first, last = int(match.group(1)), int(match.group(2) or match.group(1))
        cores += range(first, last + 1)
    if len(set(cores)) != len(cores):
        raise LaunchError(f"--bind_core_list={text} names a core twice")
    unknown = sorted(set(cores) - os.sched_getaffinity(0))
    if unknown:
        raise LaunchError(f"--bind_core_list: core {unknown[0]} is not one that this process may use")
    return cores


def share_out(cores, ranks):
    """Equal, contiguous shares, one a rank; cores left over stay unused."""
    each = len(cores) // ranks
    if each == 0:
        raise LaunchError(f"--bind_cores_to_rank: {ranks} ranks can't share {len(cores)} cores")
    return [cores[rank * each:(rank + 1) * each] for rank in range(ranks)]
