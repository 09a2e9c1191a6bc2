"""Carries a plan out with torchrun's agent."""
import contextlib
import dataclasses
import json
import logging
import os
import signal
import sys
import time
import uuid

from unshard.launcher import orphans
from unshard.launcher.errors import LaunchError
from unshard.launcher.watch import Watch, write_all

CHILD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "child.py")
TAIL_LINES = 30


def launch(plan, say, log_level="info"):
    """Start the ranks, wait for them, end them all. Returns the exit code: 0, or the first failing rank's (128 + N for signal N)."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    quieten_agent(log_level)
    if plan.log_dir:
        os.makedirs(plan.log_dir, exist_ok=True)
    before = orphans.adopt()
    watch = Watch(plan.ranks)
    begin = time.monotonic()
    failures, interrupted = {}, None
    try:
        with handed_over(plan, watch) as path:
            watch.start()
            elastic_launch(launch_config(plan, watch), sys.executable)("-I", "-S", CHILD, path)
    except ChildFailedError as error:
        failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
    except SignalException as error:
        interrupted = int(error.sigval)
    except KeyboardInterrupt:                    # before the agent had its handlers in place
        interrupted = int(signal.SIGINT)
    except RuntimeError as error:                # the store: the port was taken meanwhile, the address is not ours, ...
        reason = str(error).splitlines()[0]
        raise LaunchError(f"can't listen on {plan.master_addr}:{plan.master_port}: {reason}") from None
    finally:
        orphans.end_all_but(before)
        watch.stop()
    if interrupted:
        say(f"{signal.Signals(interrupted).name}: all ranks were ended")
        return 128 + interrupted
    if not failures:
        return 0
    return report_failure(plan, watch, failures, begin)


def launch_config(plan, watch):
    from torch.distributed.launcher.api import LaunchConfig

    options = dict(min_nodes=1, max_nodes=1, nproc_per_node=plan.ranks, run_id=uuid.uuid4().hex, role="rank", max_restarts=0,
                   rdzv_backend="static", rdzv_endpoint=f"{plan.master_addr}:{plan.master_port}", rdzv_configs={"rank": 0, "timeout": 900},
                   logs_specs=stderr_through_pipes(watch), monitor_interval=0.1)
    if "shutdown_timeout" in {field.name for field in dataclasses.fields(LaunchConfig)}:     # younger torch
        options["shutdown_timeout"] = 4
    return LaunchConfig(**options)


def stderr_through_pipes(watch):
    from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

    class ThroughPipes(LogsSpecs):
        """Standard output stays the terminal's (progress bars work); standard error goes to the watch."""

        def reify(self, envs):
            for env in envs.values():
                env["TORCHELASTIC_ERROR_FILE"] = ""
            paths = {rank: f"/proc/self/fd/{write}" for rank, (_, write) in enumerate(watch.stderr_pipes)}
            return LogsDest(stdouts=dict.fromkeys(envs, ""), stderrs=paths, error_files=dict.fromkeys(envs, os.devnull))

        @property
        def root_log_dir(self):
            return os.devnull

    return ThroughPipes()


@contextlib.contextmanager
def handed_over(plan, watch):
    """The path under which a child can read what it is to become."""
    content = {"launcher": os.getpid(), "argv": [plan.argv(rank) for rank in range(plan.ranks)], "environment": plan.environment,
               "cores": plan.cores, "log_dir": os.path.abspath(plan.log_dir) if plan.log_dir else "",
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


def report_failure(plan, watch, failures, begin):
    rank, status, at = watch.first or (min(failures), None, time.monotonic())
    status = failures.get(rank) if status is None else status
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"failed with exit code {status}"
    others = [other for other in range(plan.ranks) if other != rank]
    also = f", before any other; ended: rank {', '.join(map(str, others))}" if others else ""
    lines = [f"rank {rank} {how} after {at - begin:.1f} s{also}"]
    tail = log_tail(plan, rank) if plan.log_dir else watch.tail(rank, TAIL_LINES)
    if tail and (others or plan.log_dir):
        lines += [f"the last that rank {rank} said:"] + [f"  | {line}" for line in tail]
    write_all(2, "".join(f"[unshard run] {line}\n" for line in lines).encode())
    for other, text in watch.held().items():
        write_all(2, f"[unshard run] rank {other} said after that:\n".encode() + text)
    return status if status >= 0 else 128 - status


def log_tail(plan, rank):
    path = os.path.join(plan.log_dir, f"rank{rank}.log")
    try:
        with open(path, errors="replace", encoding="utf-8") as file:
            return [line for line in file.read()[-(64 << 10):].splitlines() if line.strip()][-TAIL_LINES:]
    except OSError:
        return []
