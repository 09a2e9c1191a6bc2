"""Carries out this machine's part of a plan with torchrun's agent."""
import contextlib
import dataclasses
import datetime
import json
import logging
import os
import signal
import socket
import sys

from unshard.folders import why_unusable
from unshard.launcher import orphans
from unshard.launcher.errors import LaunchError
from unshard.launcher.node_plan import folders
from unshard.launcher.ports import port_is_free
from unshard.launcher.watch import Watch, write_all

CHILD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "child.py")
MEETING_S = 900          # until all hosts have reached the store


@dataclasses.dataclass
class Ended:
    codes: dict              # {rank of the job: exit status, -N for signal N}, of ranks that failed
    signal: int | None       # that ended the launch from outside
    store: object            # hold_store's


def launch(plan, sink, both_streams, port_taken=None):
    """Start this host's ranks, wait for them, end them all. The sink hears of them meanwhile (see watch.Watch).

    `port_taken(port)` is told where another program took the plan's port since it was found free, and `port` is used in its place; without
    it that is an error.
    """
    for flag, path in folders(plan.log_dir, plan.environment):
        if path and (why := why_unusable(path)):
            raise LaunchError(f"{flag}={path}: {why}")
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    look_up(plan.master_addr)
    quieten_agent(plan.log_level)
    before = orphans.adopt()
    watch = Watch(plan, sink, both_streams)
    codes, interrupted, store = {}, None, None
    try:
        with handed_over(plan, watch) as path:
            watch.start()
            store = hold_store(plan, port_taken)
            elastic_launch(launch_config(plan, watch), sys.executable)("-I", "-S", CHILD, path)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
    except SignalException as error:
        interrupted = int(error.sigval)
    except KeyboardInterrupt:                    # before the agent had its handlers in place
        interrupted = int(signal.SIGINT)
    except RuntimeError as error:                # the store: the port was taken meanwhile, the address is not ours, ...
        what = "listen on" if plan.node_rank == 0 else "reach rank 0's store at"
        raise LaunchError(f"can't {what} {plan.master_addr}:{plan.master_port}: {str(error).splitlines()[0]}") from None
    finally:
        orphans.end_all_but(before)
        watch.stop()
    watch.settle(codes)
    return Ended(codes, interrupted, store)


def look_up(address):
    """torch's store tries an address that can't be found for minutes, and says nothing meanwhile."""
    try:
        socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise LaunchError(f"can't find rank 0's host '{address}': {why} (--master_addr gives another address)") from None


def hold_store(plan, port_taken=None):
    """Rank 0's host serves the store, and holds it until the last rank anywhere has ended: keep what this returns.

    The agent's own store shares this one's server, as torch does for two in one process on one port.
    """
    if plan.node_rank != 0:
        return None
    try:
        return serve_store(plan.master_addr, plan.master_port)
    except RuntimeError:
        if port_taken is None or port_is_free(plan.master_port):     # the port isn't what is wrong
            raise
    store = serve_store(plan.master_addr, 0)
    plan.master_port = store.port
    port_taken(store.port)
    return store


def serve_store(address, port):
    from torch.distributed import TCPStore

    return TCPStore(address, port, None, True, datetime.timedelta(seconds=MEETING_S), wait_for_workers=False, multi_tenant=True)


def launch_config(plan, watch):
    from torch.distributed.launcher.api import LaunchConfig

    options = dict(min_nodes=plan.nodes, max_nodes=plan.nodes, nproc_per_node=plan.ranks, run_id=plan.run_id, role="rank", max_restarts=0,
                   rdzv_backend="static", rdzv_endpoint=endpoint(plan.master_addr, plan.master_port),
                   rdzv_configs={"rank": plan.node_rank, "timeout": MEETING_S}, logs_specs=through_pipes(watch), monitor_interval=0.1)
    if "shutdown_timeout" in {field.name for field in dataclasses.fields(LaunchConfig)}:     # younger torch
        options["shutdown_timeout"] = 4
    return LaunchConfig(**options)


def endpoint(address, port):
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def through_pipes(watch):
    from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

    class ThroughPipes(LogsSpecs):
        """What the watch has a pipe for goes there, the rest to the terminal."""

        def reify(self, envs):
            for env in envs.values():
                env["TORCHELASTIC_ERROR_FILE"] = ""
            paths = {1: dict.fromkeys(envs, ""), 2: dict.fromkeys(envs, "")}
            for (rank, stream), (_, write) in watch.pipes.items():
                paths[stream][rank] = f"/proc/self/fd/{write}"
            return LogsDest(stdouts=paths[1], stderrs=paths[2], error_files=dict.fromkeys(envs, os.devnull))

        @property
        def root_log_dir(self):
            return os.devnull

    return ThroughPipes()


@contextlib.contextmanager
def handed_over(plan, watch):
    """The path under which a child can read what it is to become."""
    content = {"launcher": os.getpid(), "argv": [plan.argv(local) for local in range(plan.ranks)], "environment": plan.environment,
               "cores": plan.cores, "log_dir": os.path.abspath(plan.log_dir) if plan.log_dir else "", "first_rank": plan.first_rank,
               "started": f"/proc/{os.getpid()}/fd/{watch.started_write}"}
    fd = os.memfd_create("unshard-launch-plan", os.MFD_CLOEXEC)
    try:
        write_all(fd, json.dumps(content).encode())
        yield f"/proc/{os.getpid()}/fd/{fd}"
    finally:
        os.close(fd)


def quieten_agent(log_level):
    """The agent's own running commentary is shown with --log_level=debug only; what matters of it is said by us."""
    if log_level == "debug":
        return
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.distributed.elastic") and isinstance(logger, logging.Logger):
            logger.setLevel(logging.CRITICAL)
