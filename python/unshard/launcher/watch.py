"""Watches the ranks beside the agent: who ended first, what it said last, and that nobody outlives it.

The agent polls, so it can't tell which of two ranks that died within a tenth of a second was first; a pidfd can. Each rank's standard
error runs through a pipe here: it goes to the terminal at once, its end is kept, and after the first failure the other ranks' words wait
until the failing rank's have been shown.
"""
import collections
import os
import selectors
import signal
import threading
import time

KEPT_BYTES = 64 << 10
GRACE_S = 4.0            # between the first failure and SIGKILL for ranks that ignore SIGTERM


class Watch:
    def __init__(self, ranks):
        self.started_read, self.started_write = os.pipe()
        self.stderr_pipes = [os.pipe() for _ in range(ranks)]
        self.first = None                                        # (rank, exit status or None, time) of the first failure
        self.pids = {}
        self._tails = [collections.deque() for _ in range(ranks)]
        self._held = [[] for _ in range(ranks)]
        self._alive = {}                                         # rank -> pidfd
        self._wake_read, self._wake_write = os.pipe()
        self._killed = False
        self._thread = threading.Thread(target=self._run, name="unshard-watch", daemon=True)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.started_read, selectors.EVENT_READ, ("started", None))
        self._selector.register(self._wake_read, selectors.EVENT_READ, ("wake", None))
        for rank, (read, _) in enumerate(self.stderr_pipes):
            os.set_blocking(read, False)
            self._selector.register(read, selectors.EVENT_READ, ("stderr", rank))

    def start(self):
        self._thread.start()

    def stop(self):
        """Read what is left in the pipes, then end the thread."""
        if self._thread.is_alive():
            os.write(self._wake_write, b".")
            self._thread.join()
        for rank in range(len(self.stderr_pipes)):
            self._relay(rank)
        fds = [self.started_read, self.started_write, self._wake_read, self._wake_write, *self._alive.values()]
        for fd in fds + [fd for pipe in self.stderr_pipes for fd in pipe]:
            os.close(fd)
        self._selector.close()

    def tail(self, rank, lines):
        text = b"".join(self._tails[rank]).decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-lines:]

    def held(self):
        """{rank: bytes that the rank wrote after another one had failed}"""
        return {rank: b"".join(chunks) for rank, chunks in enumerate(self._held) if chunks}

    def _run(self):
        while True:
            for key, _ in self._selector.select(timeout=0.25):
                kind, rank = key.data
                if kind == "wake":
                    return
                if kind == "started":
                    self._add_ranks()
                elif kind == "stderr":
                    self._relay(rank)
                else:
                    self._ended(rank)
            if self.first and not self._killed and time.monotonic() > self.first[2] + GRACE_S:
                self._killed = True
                for rank in self._alive:
                    os.killpg(self.pids[rank], signal.SIGKILL)      # it leads its session, and its pidfd says that it lives

    def _add_ranks(self):
        for line in os.read(self.started_read, 4096).decode().splitlines():     # one write of under PIPE_BUF bytes a rank
            rank, pid = map(int, line.split())
            self.pids[rank] = pid
            try:
                self._alive[rank] = os.pidfd_open(pid)
            except ProcessLookupError:
                continue                                         # already reaped by the agent, which keeps its code
            self._selector.register(self._alive[rank], selectors.EVENT_READ, ("ended", rank))

    def _ended(self, rank):
        fd = self._alive.pop(rank)
        self._selector.unregister(fd)
        try:
            info = os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            status = None if info is None else info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        except ChildProcessError:
            status = None                                        # reaped by the agent first
        os.close(fd)
        self._relay(rank)                                        # its last words before anyone else's
        if status != 0 and self.first is None:
            self.first = (rank, status, time.monotonic())

    def _relay(self, rank):
        while True:
            try:
                chunk = os.read(self.stderr_pipes[rank][0], 64 << 10)
            except (BlockingIOError, OSError):
                return
            if not chunk:
                return
            tail = self._tails[rank]
            tail.append(chunk)
            while sum(map(len, tail)) - len(tail[0]) > KEPT_BYTES:
                tail.popleft()
            if self.first and self.first[0] != rank:
                self._held[rank].append(chunk)
            else:
                write_all(2, chunk)


def write_all(fd, data):
    while data:
        data = data[os.write(fd, data):]
