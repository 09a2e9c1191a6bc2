"""Who takes part, over what: the head of the table."""
import json
import os
import platform
import socket

_SPACES = ("pid", "net", "ipc")


def introduce(comm, device):
    """What each rank says of itself, in rank order; collective."""
    return [json.loads(text) for text in comm.all_gather_strings(json.dumps(_card(device)))]


def _card(device):
    import torch

    import unshard
    from unshard.report import Machine, network

    machine = Machine()
    found = network.interfaces(machine)
    gloo = network.gloo_choice(os.environ, network.host_name(machine), found)
    nccl = network.nccl_choice(os.environ, found)["interfaces"]
    by_name = {one["name"]: one for one in found}
    card = {"host": os.environ.get("UNSHARD_HOST") or socket.gethostname(), "identity": _identity(),
            "gloo": network.describe(by_name[gloo["interface"]]) if gloo["interface"] in by_name else gloo["interface"],
            "nccl": ", ".join(network.describe(by_name[name]) for name in nccl),
            "load": os.getloadavg()[0], "cores": len(os.sched_getaffinity(0)),
            "infiniband": [f"{one['device']}:{one['port']}" for one in network.infiniband(machine) if one["state"] == "ACTIVE"],
            "versions": {"unshard": unshard.__version__, "torch": torch.__version__, "Python": platform.python_version()}}
    if torch.device(device).type == "cuda":
        card["versions"]["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        card["gpu"] = torch.cuda.get_device_name(device)
    return card


def _identity():
    """Equal for ranks of one host, as the engine sees it: one kernel, the same name spaces, and the same UNSHARD_HOST if there is one."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return " ".join([os.environ.get("UNSHARD_HOST", ""), boot, *(os.readlink(f"/proc/self/ns/{space}") for space in _SPACES)])
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"


def hosts_of(cards):
    """[{host, ranks, card}] in the order of their first rank."""
    hosts = {}
    for rank, card in enumerate(cards):
        hosts.setdefault(card["identity"], {"host": card["host"], "ranks": [], "card": card})["ranks"].append(rank)
    return list(hosts.values())


def busy(host):
    """"" or what else keeps the cores that the ranks need; before the first call, so that the ranks' own work isn't in it."""
    load, cores = min(host["card"]["load"], 1e6), host["card"]["cores"]
    return f"a load of {load:.1f} on {cores} cores" if load > 0.5 and load + len(host["ranks"]) > cores else ""


def transport(comm, device, hosts):
    if comm.world_size == 1:
        return "none (one rank)"
    if not str(device).startswith("cuda"):
        if comm.shares_memory:
            return "shared memory"
        return ("shared memory inside the hosts, " if shares_inside_hosts(comm, hosts) else "") + f"Gloo over {_each(hosts, 'gloo')}"
    fabric = sorted({port for host in hosts for port in host["card"]["infiniband"]})
    links = f"InfiniBand {', '.join(fabric)}" if fabric else _each(hosts, "nccl")
    return "NCCL" + (f" over {links} between hosts" if len(hosts) > 1 else "")


def shares_inside_hosts(comm, hosts):
    """Asked of a collective: where memory is shared inside hosts, what crosses between them is counted apart. Collective."""
    import torch

    comm.all_gather(torch.empty(comm.world_size), torch.zeros(1))
    return "host_link" in comm.counts() and any(len(host["ranks"]) > 1 for host in hosts)


def _each(hosts, key):
    return " and ".join(dict.fromkeys(host["card"][key] for host in hosts))


def describe(comm, device, dtype, cards):
    """{ranks, hosts, transport, device, dtype, versions}, for the head and for JSON."""
    hosts = hosts_of(cards)
    others = {str(rank): card["versions"] for rank, card in enumerate(cards) if card["versions"] != cards[0]["versions"]}
    return {"ranks": comm.world_size, "hosts": [{"host": host["host"], "ranks": host["ranks"], "busy": busy(host)} for host in hosts],
            "transport": transport(comm, device, hosts), "device": cards[0].get("gpu", "CPU"), "dtype": dtype,
            "versions": cards[0]["versions"], "system": f"{platform.system()} {platform.release()}",
            "different_versions": others}
