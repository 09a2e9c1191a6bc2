"""The processor: model, cores that may be used, and which of its instructions the engine and torch take."""
import re

ISAS = ("portable", "avx2", "avx512")


def processor(machine):
    info = machine.text("/proc/cpuinfo")
    flags = set((_field(info, "flags") or _field(info, "Features")).split())        # Features: on ARM
    cores = parse_core_list(_field(machine.text("/proc/self/status"), "Cpus_allowed_list"))
    quota = cpu_quota(machine)
    usable = min(len(cores), max(1, int(quota))) if quota else len(cores)
    wish = machine.environ.get("UNSHARD_CPU_ISA", "")
    best = best_isa(flags)
    chosen = wish if wish in ISAS and ISAS.index(wish) < ISAS.index(best) else best
    return {
        "model": _field(info, "model name") or _field(info, "Processor") or "unknown",
        "processors": len(re.findall(r"^processor\s*:", info, re.MULTILINE)),
        "numa_nodes": max(1, sum(bool(re.fullmatch(r"node\d+", name)) for name in machine.folders("/sys/devices/system/node"))),
        "allowed": len(cores), "quota": quota, "usable": usable,
        "best_isa": best, "flat_passes": chosen, "isa_wish": wish,
        "bf16": [flag for flag in ("avx512_bf16", "avx_ne_convert", "amx_bf16", "bf16") if flag in flags],
    }


def best_isa(flags):
    """As the engine chooses (src/core/cpu_isa.cc)."""
    if not {"avx2", "fma", "f16c"} <= flags:
        return "portable"
    return "avx512" if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags else "avx2"


def cpu_quota(machine):
    """Cores that the control group grants, or None without a limit."""
    quotas = []
    for folder in control_groups(machine):
        words = machine.text(f"{folder}/cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            quotas.append(int(words[0]) / int(words[1]))
    old = machine.number("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), machine.number("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
    if old[0] and old[0] > 0 and old[1]:
        quotas.append(old[0] / old[1])
    return min(quotas, default=None)


def control_groups(machine):
    """This process's group and all above it: each may set a limit."""
    own = next((line[3:] for line in machine.text("/proc/self/cgroup").splitlines() if line.startswith("0::")), "/")
    parts = [part for part in own.split("/") if part and part != ".."]
    return ["/".join(["/sys/fs/cgroup", *parts[:depth]]) for depth in range(len(parts) + 1)]


def parse_core_list(text):
    """'0-3,8' -> [0, 1, 2, 3, 8]"""
    cores = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cores += range(int(first), int(last or first) + 1)
    return cores


def _field(text, name):
    match = re.search(rf"^{re.escape(name)}\s*:\s*(.*)$", text, re.MULTILINE)
    return match.group(1).strip() if match else ""
