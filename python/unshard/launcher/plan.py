"""From the options to a plan: how many ranks, on which devices, with which address, environment and command."""
import dataclasses
import os
import shlex
import shutil
import socket
import sys

from unshard.launcher.cores import parse_core_list, share_out, usable_cores
from unshard.launcher.env_file import read_env_files
from unshard.launcher.errors import LaunchError
from unshard.launcher.hosts import is_local, parse_filter, read_hostfile, select
from unshard.launcher.options import HOSTFILE

DEFAULT_PORT = 29500
DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclasses.dataclass
class Plan:
    ranks: int
    devices: list            # ids for CUDA_VISIBLE_DEVICES; empty on a machine without GPUs
    master_addr: str
    master_port: int
    command: list            # argv of a rank, without --local_rank
    pass_local_rank: bool    # put --local_rank=N after the script's name
    script_at: int           # where in `command` the script's own arguments begin
    environment: dict        # what every rank gets beside the launcher's environment
    cores: list              # one list of cores a rank, or empty
    log_dir: str
    notes: list              # lines for the user

    def argv(self, rank):
        local_rank = [f"--local_rank={rank}"] if self.pass_local_rank else []
        return self.command[:self.script_at] + local_rank + self.command[self.script_at:]

    def describe(self):
        where = f"GPUs {','.join(self.devices)}" if self.devices else "CPU"
        lines = [f"host localhost: {self.ranks} rank{'s' * (self.ranks > 1)} on {where}",
                 f"master {self.master_addr}:{self.master_port}"]
        lines += [f"rank {rank}: {shlex.join(self.argv(rank))}" + (f"   (cores {self.cores[rank]})" if self.cores else "")
                  for rank in range(self.ranks)]
        return "\n".join(lines + [f"env {key}={value}" for key, value in sorted(self.environment.items())])


def make_plan(options, device_count):
    """`device_count`: a function that says how many GPUs there are; asked only when needed."""
    notes = []
    pool = find_pool(options, notes)             # first: a mistake in the file is told before what can't be done with it
    refuse_what_is_not_built(options)
    slots = choose_slots(options, pool, device_count)
    command, script_at = rank_command(options)
    has_devices = pool is None and bool(device_count())
    visible = [d for d in os.environ.get(DEVICES, "").split(",") if d] if has_devices else []
    filtered = options.include or options.exclude
    devices = [] if not has_devices else visible[:len(slots)] if visible and not filtered else [str(slot) for slot in slots]
    cores = usable_cores()
    bound = []
    if options.bind_cores_to_rank:
        cores = parse_core_list(options.bind_core_list) if options.bind_core_list else cores
        bound = share_out(cores, len(slots))
    address, port = options.master_addr or "127.0.0.1", choose_port(options.master_port, notes)
    environment = rank_environment(len(slots), devices, max(1, len(cores) // len(slots)), is_local(address))
    return Plan(len(slots), devices, address, port, command, not options.no_local_rank, script_at, environment, bound,
                options.enable_each_rank_log, notes)


def refuse_what_is_not_built(options):
    if options.autotuning:
        raise LaunchError("--autotuning is not built yet; leave it out")
    if options.force_multi or options.num_nodes > 1 or options.node_rank > 0:
        raise LaunchError("several hosts are not built yet (asked for by --num_nodes, --node_rank or --force_multi); use one host")
    if options.include and options.exclude:
        raise LaunchError("--include and --exclude can't be used together")
    if (options.include or options.exclude) and (options.num_gpus >= 0 or options.num_nodes >= 0):
        raise LaunchError("--include and --exclude can't be used together with --num_nodes or --num_gpus")
    if options.num_gpus == 0 or options.num_gpus < -1:
        raise LaunchError(f"--num_gpus={options.num_gpus}: at least 1 rank is needed")


def find_pool(options, notes):
    """{host: [slot, ...]} of the hostfile, or None for this machine alone."""
    hosts = read_hostfile(options.hostfile or HOSTFILE)
    if hosts is None:
        if options.hostfile:
            notes.append(f"there is no hostfile {options.hostfile}: running on this machine alone")
        return None
    return {host: list(range(slots)) for host, slots in hosts.items()}


def choose_slots(options, pool, device_count):
    if pool is None:
        return local_slots(options, device_count)
    if options.include or options.exclude:
        pool = select(pool, options.include, options.exclude)
    elif options.num_nodes > 0:
        pool = dict(list(pool.items())[:options.num_nodes])
    if len(pool) > 1 or not is_local(next(iter(pool))):
        raise LaunchError(f"several hosts are not built yet (the hostfile asks for {', '.join(pool)}); use this machine alone")
    host, slots = next(iter(pool.items()))
    if options.num_gpus > len(slots):
        raise LaunchError(f"--num_gpus={options.num_gpus}, but the hostfile gives '{host}' {len(slots)} slots")
    return slots[:options.num_gpus] if options.num_gpus > 0 else slots


def local_slots(options, device_count):
    devices = device_count()
    if options.include or options.exclude:
        slots = devices or 1
        if options.include and (not devices or os.environ.get(DEVICES)):
            # Without GPUs a slot is just a process, so naming it makes it; under CUDA_VISIBLE_DEVICES slots are ids of the whole machine.
            slots = max([slots] + [slot + 1 for named in parse_filter(options.include, "--include").values() for slot in named])
        return select({"localhost": list(range(slots))}, options.include, options.exclude)["localhost"]
    if options.num_gpus < 0:
        return list(range(devices or 1))
    if devices and options.num_gpus > devices:
        raise LaunchError(f"--num_gpus={options.num_gpus}, but this machine shows {devices} GPUs")
    return list(range(options.num_gpus))


def rank_command(options):
    """(argv without --local_rank, where the script's arguments begin)"""
    if options.no_python and options.module:
        raise LaunchError("--no_python and --module can't be used together")
    if options.no_python:
        if shutil.which(options.script) is None:
            raise LaunchError(f"there is no program '{options.script}' that can be run")
        head = [options.script]
    elif options.module:
        head = [sys.executable, "-u", "-m", options.script]
    elif not os.path.exists(options.script):
        raise LaunchError(f"there is no script '{options.script}' in {os.getcwd()}")
    elif is_binary(options.script):
        head = [os.path.join(".", options.script)]
    else:
        head = [sys.executable, "-u", options.script]
    return head + options.arguments, len(head)


def is_binary(path):
    """A compiled program needs no --no_python: Python couldn't read it anyway."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


def port_is_free(port):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            return True
        except OSError:
            return False


def choose_port(asked, notes):
    if asked is not None:
        if not 0 < asked < 65536:
            raise LaunchError(f"--master_port={asked} is not a port; it must be 1 to 65535")
        if not port_is_free(asked):
            raise LaunchError(f"--master_port={asked} is taken or not allowed; give another, or none to have a free one chosen")
        return asked
    if port_is_free(DEFAULT_PORT):
        return DEFAULT_PORT
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    notes.append(f"port {DEFAULT_PORT} is taken: using {port}")
    return port


def rank_environment(ranks, devices, threads, all_local):
    environment = {"LOCAL_SIZE": str(ranks), "CROSS_RANK": "0", "CROSS_SIZE": "1"}
    if "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(threads)
    if all_local and "GLOO_SOCKET_IFNAME" not in os.environ and os.path.exists("/sys/class/net/lo"):
        environment["GLOO_SOCKET_IFNAME"] = "lo"     # else Gloo resolves the host's name, which fails in many containers
    if devices:
        environment[DEVICES] = ",".join(devices)
    return {**environment, **read_env_files()}
