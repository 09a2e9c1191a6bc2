"""Run a function of a test file on N ranks, each a process of its own, with a time limit.

    def train(rank, world, stage): ...; return {"loss": 1.0}       # in the test file, module level; returns something JSON can hold
    results = run_ranks(2, train, 3, limit=60)                     # [rank 0's value, rank 1's value]

A rank that raises fails the test with its traceback; `expect_failure=True` returns Outcome objects instead. Only processes started here
are ended (each leads its own session).
"""
import atexit
import contextlib
import functools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass

from zygote import Forked, Zygote, module_of


@dataclass
class Outcome:
    """What became of one rank."""
    rank: int
    code: int | None          # exit status, negative for a signal, None when it passed the limit
    value: object
    output: str
    seconds: float            # from the start of the run to this rank's end


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def rank_env(rank, world, port, extra=None):
    env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
               MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", UNSHARD_QUIET="1")
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    env.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    env.update(extra or {})
    return env


@functools.cache
def _zygote():
    zygote = Zygote()
    atexit.register(zygote.close)
    return zygote


def run_ranks(world, function, *args, limit=90, env=None, expect_failure=False, start=None, fresh=False):
    """Values of all ranks, in rank order (or Outcomes with `expect_failure`). Ranks are forked from a process that has imported torch, or
    with `fresh` are interpreters of their own (where a process's memory or its start is what is tested). `start(rank, command, **options)`
    starts a rank elsewhere (hosts.py) and gives it its environment; its process must lead its own session."""
    file = function.__code__.co_filename
    with tempfile.TemporaryDirectory(prefix="unshard_test_") as folder:
        work, port, procs, begin = pathlib.Path(folder), free_port(), [], time.monotonic()
        if fresh:
            def start(rank, command, **options):
                return subprocess.Popen(command, env=rank_env(rank, world, port, env), start_new_session=True, **options)
        for rank in range(world):
            with open(work / f"{rank}.log", "wb") as log:
                job = [file, function.__name__, str(work / f"{rank}.json"), json.dumps(args)]
                if start:
                    procs.append(start(rank, [sys.executable, __file__, *job], cwd=work, stdout=log, stderr=subprocess.STDOUT,
                                       stdin=subprocess.DEVNULL))
                else:
                    zygote = _zygote()
                    procs.append(Forked(zygote, zygote.fork(rank_env(rank, world, port, env), (__file__, "run_job", job), log, cwd=work)))
        ended = _wait(procs, begin, limit, patient=expect_failure)
        outcomes = [Outcome(r, code, _value(work / f"{r}.json"), (work / f"{r}.log").read_text(errors="replace"), seconds)
                    for r, (code, seconds) in enumerate(ended)]
    if expect_failure:
        return outcomes
    return values_of(outcomes, limit)


def values_of(outcomes, limit):
    """Values of all ranks by rank; AssertionError with the first failing rank's words, or when it passed the limit (seconds)."""
    bad = [o for o in outcomes if o.code != 0]
    if bad:
        first = min(bad, key=lambda o: (o.code is None, o.seconds))
        what = f"passed the limit of {limit} s" if first.code is None else f"ended with {first.code}"
        raise AssertionError(f"rank {first.rank} of {len(outcomes)} {what}\n{first.output[-6000:]}")
    return [o.value for o in outcomes]


def _wait(procs, start, limit, patient):
    """[(exit status or None, seconds)] by rank; ends what is left at the limit (20 s after a first failure unless `patient`)."""
    ended, deadline = [None] * len(procs), start + limit
    while any(e is None for e in ended) and time.monotonic() < deadline:
        for r, p in enumerate(procs):
            if ended[r] is None and p.poll() is not None:
                ended[r] = (p.returncode, time.monotonic() - start)
                if p.returncode != 0 and not patient:
                    deadline = min(deadline, time.monotonic() + 20)
        time.sleep(0.02)
    for r, p in enumerate(procs):
        if ended[r] is None:
            ended[r] = (None, time.monotonic() - start)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(p.pid, signal.SIGKILL)
        p.wait()
    return ended


def _value(path):
    return json.loads(path.read_text()) if path.exists() else None


def run_job(file, name, result, args):
    """A rank's life."""
    value = getattr(module_of(file), name)(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), *json.loads(args))
    pathlib.Path(result + ".part").write_text(json.dumps(value))
    os.replace(result + ".part", result)
    _leave_together()


def _leave_together():
    """A rank that ends while others still read its shards one-sided would be a death to them; so would rank 0, which serves the store, be
    to a rank that is still in the barrier: it leaves last."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return
    distributed.barrier()
    store = distributed.distributed_c10d._get_default_store()
    if distributed.get_rank() > 0:
        store.set(f"tests/left/{distributed.get_rank()}", "")
    else:
        store.wait([f"tests/left/{rank}" for rank in range(1, distributed.get_world_size())])


if __name__ == "__main__":
    try:
        run_job(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)                    # no destructors: a failed rank must be seen as failed at once
