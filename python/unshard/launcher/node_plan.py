"""From the launcher's order to what the ranks of this host get. Made on the host itself: its files, cores, devices and network count."""
import dataclasses
import os
import shlex
import socket

from unshard.launcher.cores import parse_core_list, share_out, usable_cores
from unshard.launcher.errors import LaunchError
from unshard.launcher.hosts import is_local
from unshard.launcher.interfaces import interface_towards
from unshard.launcher.rank_command import rank_command

DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclasses.dataclass
class NodePlan:
    host: str
    ranks: int               # on this host
    first_rank: int
    world: int               # ranks on all hosts
    node_rank: int
    nodes: int
    devices: list            # ids for CUDA_VISIBLE_DEVICES; empty on a machine without GPUs
    master_addr: str
    master_port: int
    run_id: str              # the same on all hosts, another for each attempt
    command: list            # argv of a rank, without --local_rank
    pass_local_rank: bool    # put --local_rank=N after the script's name
    script_at: int           # where in `command` the script's own arguments begin
    environment: dict        # what every rank gets beside this process's environment
    cores: list              # one list of cores a rank, or empty
    log_dir: str
    prefixed: bool           # output lines carry their rank
    log_level: str

    def argv(self, local_rank):
        words = [f"--local_rank={local_rank}"] if self.pass_local_rank else []
        return self.command[:self.script_at] + words + self.command[self.script_at:]

    def describe(self):
        where = f"GPUs {','.join(self.devices)}" if self.devices else "CPU"
        lines = [f"host {self.host}: {self.ranks} rank{'s' * (self.ranks > 1)} on {where}", f"master {self.master_addr}:{self.master_port}"]
        for local in range(self.ranks):
            cores = f"   (cores {self.cores[local]})" if self.cores else ""
            lines.append(f"rank {self.first_rank + local}: {shlex.join(self.argv(local))}{cores}")
        return "\n".join(lines + [f"env {key}={value}" for key, value in sorted(self.environment.items())])


def make_node_plan(order, device_count):
    """`order`: see plan.Plan.order. Raises LaunchError for what this host can't do."""
    ranks = len(order["slots"])
    check_folders(order)
    devices = choose_devices(order, device_count())
    command, script_at = rank_command(order["script"], order["arguments"], order["module"], order["no_python"],
                                      order["environment"].get("PATH"))
    cores, bound = usable_cores(), []
    if order["bind_cores"]:
        cores = parse_core_list(order["bind_core_list"]) if order["bind_core_list"] else cores
        bound = share_out(cores, ranks)
    environment = {**own_environment(order, devices, max(1, len(cores) // ranks)), **order["environment"]}
    return NodePlan(order["host"], ranks, order["first_rank"], order["world"], order["node_rank"], order["nodes"], devices,
                    order["master_addr"], order["master_port"], order["run_id"], command, order["pass_local_rank"], script_at, environment,
                    bound, order["log_dir"], order["world"] > 1 and not order["no_prefix"], order["log_level"])


def check_folders(order):
    """Where ranks are to write: a folder, or nothing yet."""
    for flag, path in folders(order["log_dir"], order["environment"]):
        there = os.path.abspath(path) if path else os.sep
        while not os.path.lexists(there):
            there = os.path.dirname(there)
        if not os.path.isdir(there):
            raise LaunchError(f"{flag}={path}: {there} is not a folder")


def folders(log_dir, environment):
    """[(flag, path or nothing)] of what the launcher was told that ranks write into."""
    return [("--enable_each_rank_log", log_dir), ("--run-dir", environment.get("UNSHARD_RUN_DIR")),
            ("--timeline", environment.get("UNSHARD_TIMELINE"))]


def choose_devices(order, count):
    """Slots that were named are ids of the whole machine; else they count through what is visible."""
    slots = order["slots"]
    if not count:
        return []
    if order["named_slots"]:
        return [str(slot) for slot in slots]
    if len(slots) > count:
        raise LaunchError(f"{len(slots)} slots are asked for, but this machine shows {count} GPUs")
    visible = [device for device in os.environ.get(DEVICES, "").split(",") if device]
    return visible[:len(slots)] if visible else [str(slot) for slot in slots]


def own_environment(order, devices, threads):
    environment = {"LOCAL_SIZE": str(len(order["slots"])), "CROSS_RANK": str(order["node_rank"]), "CROSS_SIZE": str(order["nodes"])}
    for name in ("TORCHELASTIC_RESTART_COUNT", "UNSHARD_RESTART_COUNT"):
        environment[name] = str(order["attempt"])
    environment["TORCHELASTIC_MAX_RESTARTS"] = str(order["max_restarts"])
    if "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(threads)
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        interface = "lo" if order["nodes"] == 1 and is_local(order["master_addr"]) else interface_towards(order["master_addr"])
        if interface in {name for _, name in socket.if_nameindex()}:
            environment["GLOO_SOCKET_IFNAME"] = interface
    if devices:
        environment[DEVICES] = ",".join(devices)
    return environment
