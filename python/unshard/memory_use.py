"""This process's and this machine's memory, as one line."""
import os
import resource

import torch

from unshard.loggers import logger


def memory_line(message):
    """`message`, with memory allocated on the accelerator (now, most) and resident in this process (now, most), and the machine's."""
    gib = 2**30
    parts = [message]
    if torch.cuda.is_available():
        parts.append(f"device {torch.cuda.memory_allocated() / gib:.2f} GiB, most {torch.cuda.max_memory_allocated() / gib:.2f}, reserved "
                     f"{torch.cuda.memory_reserved() / gib:.2f}")
    parts.append(f"process {resident_bytes() / gib:.2f} GiB, most {peak_resident_bytes() / gib:.2f}")
    total, available = machine_bytes()
    parts.append(f"machine {(total - available) / gib:.2f} of {total / gib:.2f} GiB used")
    return "; ".join(parts)


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes():
    """The kernel notes the peak from time to time only: it can lag behind what is resident now."""
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, resident_bytes())


def machine_bytes():
    """(all, available)"""
    with open("/proc/meminfo") as file:
        found = dict(line.split(":", 1) for line in file)
    return tuple(int(found[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))


def say(message, rank=0):
    """Log the line on rank 0."""
    if rank == 0:
        logger.info(memory_line(message))
