"""A process that has imported torch and the engine, and forks others: they begin in milliseconds, where an interpreter takes seconds.

    with Zygote() as zygote:
        pid = zygote.fork(env, (__file__, "work", [3]), log)      # work(3) in a new process, which writes to the file `log`
        code = zygote.code(pid)

A forked process leads a session of its own and ends as a script would; all end with the zygote, and it with the process that made it.
"""
import contextlib
import ctypes
import importlib.util
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback

MESSAGE_BYTES = 1 << 16


class Zygote:
    """Forks. `start(command, **options)` starts it elsewhere (in a namespace) and returns the Popen."""

    def __init__(self, start=subprocess.Popen):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock, self._codes = threading.Lock(), {}
        env = dict(os.environ, OMP_NUM_THREADS="1", UNSHARD_QUIET="1", PYTHONDONTWRITEBYTECODE="1")
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

    def fork(self, env, run, log, channel=None, cwd=None):
        """Id of a new process with the environment `env`, which calls run = (file, function, arguments as JSON can hold them), with the
        socket's descriptor `channel` before them where there is one, and writes to the file `log`."""
        message = json.dumps({"env": {name: str(value) for name, value in env.items()}, "run": run, "cwd": cwd and str(cwd)}).encode()
        with self._lock:
            socket.send_fds(self._socket, [message], [log.fileno()] + ([channel.fileno()] if channel else []))
            while "pid" not in (answer := self._receive(30)):
                self._codes[answer["ended"]] = answer["code"]
            return answer["pid"]

    def code(self, pid, patience=5.0):
        """Exit status of a forked process (negative: the signal), or None when it runs on for `patience` seconds. Told once."""
        end = time.monotonic() + patience
        while True:
            with self._lock:
                while select.select([self._socket], [], [], 0)[0]:
                    message = self._receive(0)
                    self._codes[message["ended"]] = message["code"]
                if pid in self._codes:
                    return self._codes.pop(pid)
            if time.monotonic() >= end:
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


class Forked:
    """A forked process as subprocess.Popen shows one of its own."""

    def __init__(self, zygote, pid):
        self._zygote, self.pid, self.returncode = zygote, pid, None

    def poll(self):
        if self.returncode is None:
            self.returncode = self._zygote.code(self.pid, 0)
        return self.returncode

    def wait(self):
        while self.poll() is None:
            time.sleep(0.01)
        return self.returncode


def module_of(file):
    """The module in a file, by its name, with its folder on the path; loaded once."""
    path = pathlib.Path(file)
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- inside the zygote -------------------------------------------------------------------------------------------------------------
def _main(control):
    import torch._dynamo  # noqa: F401  (seconds, which checkpoint() would take in every process)
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
            _become(json.loads(message), *fds)
            return
        for one in fds:
            os.close(one)
        children.add(pid)
        control.send(json.dumps({"pid": pid}).encode())


def _become(message, log, *channel):
    """What a forked process does: it returns where a script would end."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)      # PR_SET_PDEATHSIG: end with the zygote
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.clear()
        os.environ.update(message["env"])
        if message["cwd"]:
            os.chdir(message["cwd"])
        file, name, arguments = message["run"]
        getattr(module_of(file), name)(*channel, *arguments)
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)                                              # no destructors: a failed rank must be seen as failed at once


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        _main(socket.socket(fileno=int(sys.argv[1])))
