"""GPUs and what joins them, from nvidia-smi."""
import re

_QUERY = ["nvidia-smi", "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader,nounits"]


def gpus(machine):
    """[{index, name, memory_mib, driver}]"""
    found = []
    for line in (machine.run(_QUERY) or "").splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 4 and words[0].isdigit():
            found.append({"index": int(words[0]), "name": words[1], "memory_mib": int(words[2]) if words[2].isdigit() else None,
                          "driver": words[3]})
    return found


def driver_without_tool(machine):
    """The kernel's driver is loaded and shows GPUs, but nvidia-smi isn't here or fails."""
    return bool(machine.folders("/proc/driver/nvidia/gpus")) and machine.run(_QUERY) is None


def gpu_links(machine):
    """[{a, b, link}] of every pair; link as nvidia-smi names it: NV18 (NVLink, 18 of them), PIX, PXB, PHB, NODE, SYS."""
    return parse_topology(machine.run(["nvidia-smi", "topo", "-m"]) or "")


def parse_topology(text):
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)               # the head line is underlined
    head, links = [], []
    for line in text.splitlines():
        words = line.split()
        if not head:
            head = [word for word in words if re.fullmatch(r"(GPU|NIC)\d+|mlx\S+", word)]
        elif words and re.fullmatch(r"GPU\d+", words[0]):
            links += [{"a": words[0], "b": other, "link": link} for other, link in zip(head, words[1:])
                      if re.fullmatch(r"GPU\d+", other) and int(other[3:]) > int(words[0][3:])]
    return links


def summary(links):
    """{'NVLink x18': 28, 'SYS': 0}: pairs by kind."""
    counts = {}
    for one in links:
        match = re.fullmatch(r"NV(\d+)", one["link"])
        kind = f"NVLink x{match.group(1)}" if match else one["link"]
        counts[kind] = counts.get(kind, 0) + 1
    return counts
