"""The report as text."""
from unshard.report import gpus, network
from unshard.report.findings import LEVELS


def show(facts, found):
    lines = []
    for title, rows in (("Software", software(facts["software"])), ("Processor", processor(facts)), ("Memory", memory(facts["memory"])),
                        ("GPUs", graphics(facts)), ("Links", links(facts)), ("Choice of interface", choice(facts["network"]))):
        lines += [title, *(f"  {name:<16} {value}" for name, value in rows), ""]
    return "\n".join(lines + problems(found))


def problems(found):
    if not found:
        return ["Nothing wrong was found."]
    lines = []
    for level, words in LEVELS.items():
        of_level = [one for one in found if one.level == level]
        if of_level:
            lines.append(f"{words[0].upper()}{words[1:]}")
        for one in of_level:
            lines += [f"  - {one.what}", f"    cure: {one.cure}"]
    return lines


def software(facts):
    torch = facts["torch"] or "not found"
    cuda = f", CUDA {facts['torch_cuda']}" if facts["torch_cuda"] else ", CPU only" if facts["torch"] else ""
    probe = facts["probe"]
    yield "unshard", f"{facts['unshard']} in {facts['unshard_folder']}"
    yield "engine", (probe.get("engine_error") or probe.get("torch_error")
                     or f"loads; built with {facts['compiler'] or 'an unknown compiler'}")
    yield "torch", f"{torch}{cuda}{', NCCL ' + probe['nccl'] if 'nccl' in probe else ''}" + (
        f" in {facts['torch_folders'][0]}" if facts["torch_folders"] else "")
    yield "python", f"{facts['python']} ({facts['python_program']})"
    yield "system", f"{facts['os']}, Linux {facts['kernel']}{', in a container' if facts['container'] else ''}"


def processor(facts):
    cpu, job = facts["processor"], facts["job"]
    quota = f", a quota of {cpu['quota']:g} cores" if cpu["quota"] else ""
    yield "model", cpu["model"]
    nodes = f"{cpu['numa_nodes']} NUMA node{'s' * (cpu['numa_nodes'] > 1)}"
    yield "cores", f"{cpu['usable']} usable of {cpu['processors']} (affinity allows {cpu['allowed']}{quota}); {nodes}"
    yield "flat passes", cpu["flat_passes"] + (f" (the processor has {cpu['best_isa']})" if cpu["flat_passes"] != cpu["best_isa"] else "")
    yield "bf16", f"{', '.join(cpu['bf16'])} for torch's matrix products" if cpu["bf16"] else "no instructions for it: torch emulates it"
    yield "threads", f"OMP_NUM_THREADS={job['omp_num_threads']}" if job["omp_num_threads"] else "OMP_NUM_THREADS isn't set"


def memory(facts):
    limit = f", limited to {gib(facts['limit_bytes'])}" if facts["limit_bytes"] else ""
    size = facts["dev_shm_bytes"]
    names = (("open_files", "ulimit -n"), ("locked_memory", "ulimit -l"), ("address_space", "ulimit -v"), ("processes", "ulimit -u"))
    yield "memory", f"{gib(facts['total_bytes'])}, {gib(facts['available_bytes'])} available{limit}"
    yield "shared", f"memfd {facts['memfd_error'] or 'works'}; /dev/shm " + ("is not there" if size is None else gib(size))
    yield "limits", ", ".join(f"{word} {limit_text(name, facts['limits'][name][0])}" for name, word in names if name in facts["limits"])


def limit_text(name, value):
    if value is None:
        return "unlimited"
    return f"{value >> 10} KiB" if name in ("locked_memory", "address_space") else str(value)


def graphics(facts):
    for gpu in facts["gpus"]:
        yield f"GPU {gpu['index']}", f"{gpu['name']}, {gib((gpu['memory_mib'] or 0) << 20)}, driver {gpu['driver']}"
    if not facts["gpus"]:
        yield "none", ""
    if facts["gpu_links"]:
        counts = gpus.summary(facts["gpu_links"])
        yield "joined by", ", ".join(f"{kind} ({pairs} pair{'s' * (pairs > 1)})" for kind, pairs in counts.items())


def links(facts):
    for one in facts["infiniband"]:
        yield f"{one['device']}:{one['port']}", f"{one['link_layer'] or 'InfiniBand'}, {one['state']}, {one['rate'] or 'rate unknown'}"
    for one in facts["interfaces"]:
        speed = f", {network.speed_text(one['speed_mbit'])}" if one["speed_mbit"] else ""
        mtu = f", MTU {one['mtu']}" if one["mtu"] else ""
        yield one["name"], (f"{one['kind']}, {'up' if one['up'] else 'down'}{speed}{mtu}, "
                            f"{', '.join(one['addresses']) or 'no address'}")


def choice(facts):
    gloo, nccl, name = facts["gloo"], facts["nccl"], facts["host_name"]
    yield "host name", f"{name['name']}: {', '.join(name['addresses']) or name['error']}"
    yield "Gloo", f"{gloo['interface']} ({gloo['address'] or 'no address'}), because {gloo['why']}"
    yield "NCCL", f"{', '.join(nccl['interfaces']) or 'none'}, because {nccl['why']}"


def gib(count):
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count >> 20} MiB"
