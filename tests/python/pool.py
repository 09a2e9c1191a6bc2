"""Ranks that start in milliseconds and stay alive from one call to the next: a zygote forks them, so that a test can afford hundreds of
small jobs, or to lose its ranks in each.

    with Zygote() as zygote, Pool(zygote, ["left", "left", "right"]) as pool:      # 3 ranks on two "hosts" of this machine (UNSHARD_HOST)
        values = pool.call(train, 3, limit=30)                                     # train(rank, world, 3) on every rank, by rank
        outcomes = pool.outcomes(train, 1, limit=30)                               # the same where ranks may fail: what became of each

    with Hosts(2) as hosts, Zygotes(hosts) as zygotes, Pool.on_hosts(hosts, zygotes, [2, 2]) as pool: ...

A rank whose function raises ends, as a script would; a pool that lost a rank is of no more use. Functions live in modules that import
little (no pytest). Everything here ends its own processes only, and they end when this process does.
"""
import contextlib
import itertools
import json
import os
import pathlib
import select
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass

import ranks
from zygote import MESSAGE_BYTES, Zygote, module_of

_ports = itertools.count(31000)


class Zygotes(contextlib.ExitStack):
    """One in each of Hosts' hosts."""

    def __init__(self, hosts):
        super().__init__()
        self.each = [self.enter_context(Zygote(lambda command, i=i, **options: hosts.popen(i, command, **options)))
                     for i in range(hosts.count)]


@dataclass
class Outcome:
    """What became of one rank in one call."""
    rank: int
    code: int | None          # 0: returned; 1: raised; negative: killed by that signal; None: at neither end when time was up
    value: object
    output: str               # of the rank's whole life, tracebacks included
    seconds: float            # from the call to this rank's end of it


class Pool:
    """Ranks on named hosts of this machine: `hosts` has a name for each rank (UNSHARD_HOST), or is the number of ranks on this host as it
    is. `env`: variables for all ranks."""

    def __init__(self, zygote, hosts, env=None):
        names = [None] * hosts if isinstance(hosts, int) else list(hosts)
        own = [{"UNSHARD_HOST": name} if name else {} for name in names]
        self._start([(zygote, str(name)) for name in names], "127.0.0.1", ranks.free_port(), [{**one, **(env or {})} for one in own])

    @classmethod
    def on_hosts(cls, hosts, zygotes, per_host, env=None):
        """per_host[i] ranks on host i of Hosts."""
        places = [(zygotes.each[i], str(i)) for i, count in enumerate(per_host) for _ in range(count)]
        pool = cls.__new__(cls)
        pool._start(places, hosts.address(0), next(_ports), [{"GLOO_SOCKET_IFNAME": "eth0", **(env or {})} for _ in places])
        return pool

    def _start(self, places, address, port, envs):
        self.world = len(places)
        self._folder = tempfile.TemporaryDirectory(prefix="unshard_pool_")
        self._zygotes, self.pids, self._sockets, self._texts = [zygote for zygote, _ in places], [], [], [b""] * len(places)
        self._ended = {}                                         # rank -> exit status
        hosts = [host for _, host in places]
        for rank, (zygote, host) in enumerate(places):
            env = {**ranks.rank_env(rank, self.world, port), "LOCAL_RANK": hosts[:rank].count(host), "LOCAL_WORLD_SIZE": hosts.count(host),
                   "MASTER_ADDR": address, **envs[rank]}
            mine, theirs = socket.socketpair()
            self._sockets.append(mine)
            with theirs, open(self._log(rank), "wb") as log:
                self.pids.append(zygote.fork(env, (__file__, "obey", [rank, self.world]), log, channel=theirs))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _log(self, rank):
        return pathlib.Path(self._folder.name) / f"{rank}.log"

    def call(self, function, *args, limit=60):
        """Values of all ranks by rank; AssertionError with the first failing rank's words, or when the limit is passed."""
        return ranks.values_of(self.outcomes(function, *args, limit=limit, after_failure=10), limit)

    def outcomes(self, function, *args, limit=60, after_failure=None, leave_out=()):
        """An Outcome a rank; ranks that are at no end at the limit (or `after_failure` seconds after the first failure) are killed, as are
        those of `leave_out` when all others are at an end."""
        job = json.dumps([function.__code__.co_filename, function.__name__, args]).encode() + b"\n"
        begin = time.monotonic()
        for one in self._sockets:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                one.sendall(job)
        answers, end = {}, begin + limit
        while any(rank not in answers for rank in range(self.world) if rank not in leave_out) and time.monotonic() < end:
            waiting = [rank for rank in range(self.world) if rank not in answers]
            ready = select.select([self._sockets[rank] for rank in waiting], [], [], max(0.0, end - time.monotonic()))[0]
            for rank in waiting:
                if self._sockets[rank] in ready:
                    answer = self._read(rank)
                    if answer is not None:
                        answers[rank] = (answer, time.monotonic() - begin)
                        if after_failure is not None and not (answer and answer.get("done")):
                            end = min(end, time.monotonic() + after_failure)
        return [self._outcome(rank, *answers.get(rank, (None, time.monotonic() - begin))) for rank in range(self.world)]

    def _read(self, rank):
        """The rank's answer, {} when it has ended without one, None when there is more to come."""
        try:
            data = self._sockets[rank].recv(MESSAGE_BYTES)
        except ConnectionResetError:
            data = b""
        if not data:
            return {}
        self._texts[rank] += data
        if not self._texts[rank].endswith(b"\n"):
            return None
        answer, self._texts[rank] = json.loads(self._texts[rank]), b""
        return answer

    def _outcome(self, rank, answer, seconds):
        if answer and answer.get("done"):
            code = 0
        elif answer is None:
            code = None
            self.kill(rank)
        else:
            code = self._code(rank)
        return Outcome(rank, code, (answer or {}).get("value"), self._log(rank).read_text(errors="replace"), seconds)

    def kill(self, rank, signal_number=signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            if rank not in self._ended:
                os.kill(self.pids[rank], signal_number)

    def _code(self, rank):
        if rank not in self._ended:
            self._ended[rank] = self._zygotes[rank].code(self.pids[rank])
        return self._ended[rank]

    def close(self):
        for rank in range(self.world):
            self.kill(rank)
        for rank, one in enumerate(self._sockets):
            one.close()
            self._code(rank)
        self._folder.cleanup()


# ---- inside a rank -------------------------------------------------------------------------------------------------------------------
def obey(channel, rank, world):
    """Does one job after another, until the pool goes. Never returns."""
    channel = socket.socket(fileno=channel)
    for line in channel.makefile("rb"):
        file, name, args = json.loads(line)
        value = getattr(module_of(file), name)(rank, world, *args)
        sys.stdout.flush()
        channel.sendall(json.dumps({"done": True, "value": value}).encode() + b"\n")
    os._exit(0)
