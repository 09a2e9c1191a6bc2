"""From the options to a plan of the whole job: which hosts, how many ranks on each, and what they run."""
import concurrent.futures
import dataclasses
import os

from unshard.launcher import options as flags
from unshard.launcher.env_file import SECRET, SET_BY_LAUNCHER, exported, read_env_files
from unshard.launcher.errors import LaunchError
from unshard.launcher.hosts import is_local, parse_filter, read_hostfile, select
from unshard.launcher.interfaces import is_here
from unshard.launcher.node_plan import DEVICES
from unshard.launcher.ports import check_port, choose_port
from unshard.launcher.rank_command import rank_command

HERE, SSH, MEET = "here", "ssh", "meet"      # all ranks on this machine; reached by ssh; each host was given the command itself


@dataclasses.dataclass
class Share:
    """One host's part of the job."""
    host: str
    slots: list | None       # None: only that host knows, and will say
    first_rank: int = 0


@dataclasses.dataclass
class Plan:
    way: str                 # HERE, SSH, MEET or one of options.TOOLS
    shares: list
    task: dict               # what every rank runs: see node_plan.make_node_plan
    master_addr: str         # "" where it has still to be found
    master_port: int | None  # the one asked for, or on this machine the one to use
    node_rank: int           # which share is this machine's, for MEET
    max_restarts: int
    local: list              # for SSH: names of hosts that are this machine, and need no ssh
    notes: list              # lines for the user
    secret: str = ""         # for MEET: what a host must know to join; "" for none
    by_tool: bool = False    # for MEET: one of options.TOOLS started this
    port_asked: bool = False  # the port was given, so no other may be used in its place

    @property
    def world(self):
        return sum(len(share.slots or ()) for share in self.shares)

    def number(self):
        """Give every share its first rank, in the order of the hosts."""
        first = 0
        for share in self.shares:
            share.first_rank = first
            first += len(share.slots)

    def order(self, node, run_id, attempt=0, **changes):
        """What host number `node` is told to do."""
        share = self.shares[node]
        order = {"host": share.host, "slots": share.slots, "first_rank": share.first_rank, "world": self.world, "node_rank": node,
                 "nodes": len(self.shares), "master_addr": self.master_addr, "master_port": self.master_port, "run_id": run_id,
                 "attempt": attempt, "max_restarts": self.max_restarts}
        return {**self.task, **order, **changes}

    def order_of_meeting(self, stated):
        """The order of this machine's share, of which host 0 has stated a part."""
        share = self.shares[self.node_rank]
        return {**self.task, "host": share.host, "slots": share.slots, **stated}


def make_plan(options, device_count):
    """`device_count`: a function that says how many GPUs there are here; asked only when needed."""
    notes = []
    pool = find_pool(options, notes)             # first: a mistake in the file is told before what can't be done with it
    refuse_contradictions(options, pool)
    check_port(options.master_port)
    slots = choose_slots(options, pool, device_count)
    local = [host for host in slots if not options.force_multi and is_local(host)] if pool else list(slots)
    way = choose_way(options, slots, local)
    if way == SSH and not options.force_multi:
        with concurrent.futures.ThreadPoolExecutor(32) as look_up:
            local = [host for host, here in zip(slots, look_up.map(is_here, slots)) if here or host in local]
        if len(slots) == 1 and local:
            way = HERE
    plan = Plan(way, [Share(host, numbers) for host, numbers in slots.items()], task_of(options, way), options.master_addr,
                options.master_port, options.node_rank, options.max_restarts, local, notes,
                os.environ.get(SECRET, "") if way == MEET else "", port_asked=options.master_port is not None)
    if way == HERE:
        plan.master_addr, plan.master_port = options.master_addr or "127.0.0.1", choose_port(options.master_port, notes)
        rank_command(options.script, options.arguments, options.module, options.no_python)     # a missing script is told now
    if way != MEET:
        plan.number()
    return plan


def refuse_contradictions(options, pool):
    filtered = options.include or options.exclude
    if options.autotuning:
        raise LaunchError("--autotuning is not built yet; leave it out")
    if options.no_python and options.module:
        raise LaunchError("--no_python and --module can't be used together")
    if options.include and options.exclude:
        raise LaunchError("--include and --exclude can't be used together")
    if filtered and (options.num_gpus >= 0 or options.num_nodes >= 0):
        raise LaunchError("--include and --exclude can't be used together with --num_nodes or --num_gpus")
    if options.num_gpus == 0 or options.num_gpus < -1:
        raise LaunchError(f"--num_gpus={options.num_gpus}: at least 1 rank is needed")
    if options.bind_core_list and not options.bind_cores_to_rank:
        raise LaunchError("--bind_core_list says which cores --bind_cores_to_rank shares out: give that too")
    if options.max_restarts < 0:
        raise LaunchError(f"--max-restarts={options.max_restarts}: it must be 0 or more")
    if options.node_rank >= 0 and not options.no_ssh:
        raise LaunchError("--node_rank says which host this is where each host is given the command itself: give --no_ssh too")
    if options.no_ssh:
        if options.launcher != "ssh":
            raise LaunchError(f"--no_ssh and --launcher={options.launcher} can't be used together")
        if pool is None and options.num_nodes < 1:
            raise LaunchError("--no_ssh needs a hostfile or --num_nodes, to know how many hosts there are")
        if options.node_rank < 0:
            raise LaunchError("--no_ssh needs --node_rank: 0 on the master, 1, 2, ... on the other hosts")
        if not options.master_addr and pool is None and options.num_nodes > 1:
            raise LaunchError("--no_ssh needs --master_addr, the address of the host with --node_rank=0")
    elif pool is None and options.num_nodes > 1:
        raise LaunchError(f"--num_nodes={options.num_nodes} needs a hostfile (with a line 'name slots=N' for each host), or --no_ssh")


def choose_way(options, slots, local):
    if options.no_ssh:
        return MEET if len(slots) > 1 else HERE
    if len(slots) == 1 and local:
        return HERE
    return options.launcher


def find_pool(options, notes):
    """{host: [slot, ...]} of the hostfile, or None for this machine alone."""
    hosts = read_hostfile(options.hostfile or flags.HOSTFILE)
    if hosts is None:
        if options.hostfile:
            notes.append(f"there is no hostfile {options.hostfile}: running on this machine alone")
        return None
    return {host: list(range(slots)) for host, slots in hosts.items()}


def choose_slots(options, pool, device_count):
    """{host: [slot, ...]}, one slot a rank, in the order of ranks."""
    if pool is None and options.no_ssh:
        return slots_of_meeting(options, device_count)
    if pool is None:
        return {"localhost": local_slots(options, device_count)}
    if options.include or options.exclude:
        pool = select(pool, options.include, options.exclude)
    elif options.num_nodes > 0:
        if options.num_nodes > len(pool):
            raise LaunchError(f"--num_nodes={options.num_nodes}, but the hostfile names {len(pool)} hosts")
        pool = dict(list(pool.items())[:options.num_nodes])
    for host, slots in pool.items():
        if options.num_gpus > len(slots):
            raise LaunchError(f"--num_gpus={options.num_gpus}, but the hostfile gives '{host}' {len(slots)} slots")
    if options.no_ssh and options.node_rank >= len(pool):
        raise LaunchError(f"--node_rank={options.node_rank}, but there are {len(pool)} hosts, counted from 0")
    return {host: slots[:options.num_gpus] if options.num_gpus > 0 else slots for host, slots in pool.items()}


def slots_of_meeting(options, device_count):
    """Without a hostfile each host knows its own slots only."""
    if options.node_rank >= options.num_nodes:
        raise LaunchError(f"--node_rank={options.node_rank}, but --num_nodes={options.num_nodes} hosts are counted from 0")
    own = local_slots(options, device_count)
    return {f"host{node}": own if node == options.node_rank else None for node in range(options.num_nodes)}


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


def task_of(options, way):
    environment = {key: value for key, value in read_env_files().items() if key not in SET_BY_LAUNCHER}
    if way == SSH or way in flags.TOOLS:
        environment = {**exported(), **environment}
    if options.run_dir:
        environment["UNSHARD_RUN_DIR"] = os.path.abspath(options.run_dir)
        environment["UNSHARD_RECORD_AT_END"] = str(int(options.record_at_end))
    if options.timeline:
        environment["UNSHARD_TIMELINE"] = os.path.abspath(options.timeline)
    return {"cwd": os.getcwd(), "script": options.script, "arguments": options.arguments, "module": options.module,
            "no_python": options.no_python, "pass_local_rank": not options.no_local_rank, "environment": environment,
            "named_slots": bool(options.include or options.exclude), "bind_cores": options.bind_cores_to_rank,
            "bind_core_list": options.bind_core_list, "log_dir": options.enable_each_rank_log, "no_prefix": options.no_rank_prefix,
            "log_level": options.log_level}
