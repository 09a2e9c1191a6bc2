"""Runs on each host of a job, started by the launcher: `python -m unshard.launcher.node`.

It says hello, waits for its order, starts this host's ranks and tells what becomes of them, in frames over standard input and output. That
input is also the lease on the ranks' lives: when it ends, because the launcher or the connection is gone, they are ended.
"""
import argparse
import os
import queue
import signal
import sys
import threading
import time

from unshard.launcher import orphans
from unshard.launcher.devices import device_count
from unshard.launcher.errors import LaunchError
from unshard.launcher.frames import Unpacker, pack
from unshard.launcher.guard import guarded
from unshard.launcher.hello import hello
from unshard.launcher.rank_command import rank_command
from unshard.launcher.watch import GRACE_S, write_all
from unshard.streams import complete, discard


def main(argv=None):
    complete()
    parser = argparse.ArgumentParser(prog="python -m unshard.launcher.node", description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="", help="what the launcher calls this host")
    parser.add_argument("--master", action="store_true", help="rank 0 will be here")
    parser.add_argument("--port", type=int, default=None, help="the port asked for, on rank 0's host")
    parser.add_argument("shown", nargs=argparse.REMAINDER, help="for readers of a list of processes; the order comes over standard input")
    options = parser.parse_args(argv)
    return guarded(lambda: run(options))


def run(options):
    os.environ.pop("RANK", None)                 # of no job but the one to come
    link = Line()
    node = Node(link)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        link.send("hello", **hello(options.port, options.master))
        threading.Thread(target=node.listen, name="unshard-link", daemon=True).start()
        code = node.work()
    except LaunchError as error:
        link.send("refused", words=str(error))
        code = 2
    link.leave(code)


class Line:
    """Standard input and output, kept for the launcher; whatever else prints goes to standard error."""

    def __init__(self):
        self.read_fd, self._write_fd = os.dup(0), os.dup(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def send(self, kind, payload=b"", **fields):
        with self._lock:
            try:
                write_all(self._write_fd, pack(kind, payload, **fields))
            except OSError:
                pass                             # the launcher is gone; its end of our input says so too

    def leave(self, code):
        discard()
        os._exit(code)                           # at once: the reading thread waits, and the store's threads may


class Node:
    def __init__(self, link):
        self.link = link
        self._orders, self._ended = queue.Queue(), threading.Event()
        self._before = orphans.children()
        self._stopping = self._working = False
        self._lock = threading.Lock()

    # ---- the sink of the watch

    def output(self, rank, stream, data):
        self.link.send("output", data, rank=rank, stream=stream)

    def failed(self, rank, status, tail):
        self.link.send("failed", rank=rank, status=status, tail=tail)

    def idle(self):
        pass

    reader_gone = False                          # the launcher's end of the line says that, and what to do

    # ---- the main thread

    def work(self):
        import_torch()                           # takes a second or two; meanwhile the launcher hears from the other hosts
        from unshard.launcher.agent import launch
        from unshard.launcher.node_plan import make_node_plan

        order = self._orders.get()
        plan = make_node_plan(order, device_count)
        with self._lock:
            if self._stopping:
                return 0
            self._working = True
        ended = launch(plan, self, both_streams=True)
        self._working = False
        self.link.send("done", codes=ended.codes, stopped=ended.signal)
        if not ended.codes and ended.signal is None:
            self._ended.wait()                   # holds the store for ranks that still run elsewhere
        return 0

    # ---- the listening thread

    def listen(self):
        unpacker = Unpacker()
        while data := self._read():
            for fields, _ in unpacker.feed(data):
                kind = fields and fields["kind"]
                if kind == "order":
                    self._take(fields)
                elif kind == "end":
                    self._ended.set()
                elif kind == "stop":
                    threading.Thread(target=self.stop, daemon=True).start()
                elif kind == "kill":
                    self.end_now()
        self._ended.set()
        self.stop()

    def _take(self, order):
        """What is plainly impossible is refused now: the main thread may be importing torch still."""
        try:
            os.chdir(order["cwd"])
            rank_command(order["script"], order["arguments"], order["module"], order["no_python"], order["environment"].get("PATH"))
        except (OSError, LaunchError) as error:
            words = str(error) if isinstance(error, LaunchError) else f"can't work in {order['cwd']}: {error.strerror}"
            self.link.send("refused", words=words)
            self.end_now()
        self._orders.put(order)

    def _read(self):
        try:
            return os.read(self.link.read_fd, 64 << 10)
        except OSError:
            return b""

    def stop(self):
        """End the ranks, then this process: they get SIGTERM by way of the agent, and what is left after the grace SIGKILL."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
        if not self._working:
            self.end_now()
        os.kill(os.getpid(), signal.SIGTERM)     # the agent, on the main thread, ends its ranks
        end, idle_since = time.monotonic() + GRACE_S, None
        while time.monotonic() < end:
            time.sleep(0.05)
            # An agent that waits for other hosts' agents hears no signal. Without ranks to end there is nothing to wait for.
            busy = orphans.children() - self._before
            idle_since = None if busy else idle_since or time.monotonic()
            if idle_since and time.monotonic() - idle_since > 0.5:
                break
        self.end_now()

    def end_now(self):
        orphans.end_all_but(self._before)
        self.link.leave(1)


def import_torch():
    """Without the warnings of its sockets, which name what they can't find in the DNS. The ranks are to have them all the same."""
    own = "TORCH_CPP_LOG_LEVEL" not in os.environ
    if own:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    import torch.distributed.launcher.api  # noqa: F401

    if own:
        del os.environ["TORCH_CPP_LOG_LEVEL"]


if __name__ == "__main__":
    sys.exit(main())
