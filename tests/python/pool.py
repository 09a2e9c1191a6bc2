"""Ranks that start in milliseconds and stay alive from one call to the next. A zygote (a process that has imported torch and the engine)
forks them, so that a test can afford hundreds of small jobs, or to lose its ranks in each.

    with Zygote() as zygote, Pool(zygote, ["left", "left", "right"]) as pool:      # 3 ranks on two "hosts" of this machine (UNSHARD_HOST)
        values = pool.call(train, 3, limit=30)                                     # train(rank, world, 3) on every rank, by rank
        outcomes = pool.outcomes(train, 1, limit=30)                               # the same where ranks may fail: what became of each

    with Hosts(2) as hosts, Zygotes(hosts) as zygotes, Pool.on_hosts(hosts, zygotes, [2, 2]) as pool: ...

A rank whose function raises ends, as a script would; a pool that lost a rank is of no more use. Functions live in modules that import
little (no pytest). Everything here ends its own processes only, and they end when this process does.
"""
import contextlib
import ctypes
import importlib.util
import itertools
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass

import ranks

MESSAGE_BYTES = 1 << 16
_ports = itertools.count(31000)


class Zygote:
    """Forks ranks. `start(command, **options)` starts it elsewhere (in a namespace) and returns the Popen."""

    def __init__(self, start=subprocess.Popen):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock, self._codes = threading.Lock(), {}
        env = ranks.rank_env(0, 1, 0)
        with theirs:
            self._process = start([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=env,
                                  stdin=subprocess.DEVNULL, start_new_session=True)
        if self._receive(60) != {"up": True}:
            self.close()
            raise RuntimeError("the zygote didn't start")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def fork(self, env, work, log):
        """Id of a new process with `env` added to its environment, which obeys the socket `work` and writes to the file `log`."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(env).encode()], [work.fileno(), log.fileno()])
            while "pid" not in (message := self._receive(30)):
                self._codes[message["ended"]] = message["code"]
            return message["pid"]

    def code(self, pid, patience=5.0):
        """Exit status of a rank (negative: the signal), or None when it runs on for `patience` seconds."""
        end = time.monotonic() + patience
        while True:
            with self._lock:
                while select.select([self._socket], [], [], 0)[0]:
                    message = self._receive(0)
                    self._codes[message["ended"]] = message["code"]
                if pid in self._codes:
                    return self._codes.pop(pid)
            if time.monotonic() > end:
                return None
            time.sleep(0.01)

    def close(self):
        self._socket.close()                                     # the sign to end
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self, patience):
        if not select.select([self._socket], [], [], patience)[0]:
            raise RuntimeError("the zygote doesn't answer")
        data = self._socket.recv(MESSAGE_BYTES)
        if not data:
            raise RuntimeError("the zygote has ended")
        return json.loads(data)


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
            env = {"RANK": rank, "WORLD_SIZE": self.world, "LOCAL_RANK": hosts[:rank].count(host), "LOCAL_WORLD_SIZE": hosts.count(host),
                   "MASTER_ADDR": address, "MASTER_PORT": port, **envs[rank]}
            mine, theirs = socket.socketpair()
            self._sockets.append(mine)
            with theirs, open(self._log(rank), "wb") as log:
                self.pids.append(zygote.fork({name: str(value) for name, value in env.items()}, theirs, log))

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


# ---- inside the zygote -------------------------------------------------------------------------------------------------------------
def zygote_main(fd):
    control = socket.socket(fileno=fd)
    import torch._dynamo  # noqa: F401  (seconds, which checkpoint() would take in every rank)
    import torch.distributed  # noqa: F401

    import unshard
    _ = unshard.initialize                                       # loads the engine's library; no thread and no memory is made by it
    control.send(json.dumps({"up": True}).encode())
    children = set()
    while True:
        ready = select.select([control], [], [], 0.02 if children else None)[0]
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.remove(pid)
                control.send(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}).encode())
        if not ready:
            continue
        message, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 2)
        if not message:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            _rank_main(json.loads(message), *fds)
        for one in fds:
            os.close(one)
        children.add(pid)
        control.send(json.dumps({"pid": pid}).encode())


def _rank_main(env, work, log):
    """Never returns."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)      # PR_SET_PDEATHSIG: end with the zygote
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(env)
        channel = socket.socket(fileno=work)
        modules = {}
        for line in channel.makefile("rb"):
            file, name, args = json.loads(line)
            value = getattr(_module(file, modules), name)(int(env["RANK"]), int(env["WORLD_SIZE"]), *args)
            sys.stdout.flush()
            channel.sendall(json.dumps({"done": True, "value": value}).encode() + b"\n")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)                                              # no destructors: a failed rank must be seen as failed at once
    os._exit(0)


def _module(file, modules):
    if file not in modules:
        folder = str(pathlib.Path(file).parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        spec = importlib.util.spec_from_file_location(pathlib.Path(file).stem, file)
        modules[file] = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = modules[file]
        spec.loader.exec_module(modules[file])
    return modules[file]


if __name__ == "__main__":
    zygote_main(int(sys.argv[1]))
