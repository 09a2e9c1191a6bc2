"""Watches this machine's ranks beside the agent: who ended first, what it said last, and that nobody outlives it.

The agent polls, so it can't tell which of two ranks that died within a tenth of a second was first; a pidfd can. The ranks' output runs
through pipes here: it goes on at once, and the end of what each rank said on standard error is kept.
"""
import collections
import os
import select
import selectors
import signal
import threading
import time

from unshard.launcher.exit_status import exit_status

KEPT_BYTES = 64 << 10
TAIL_LINES = 30
GRACE_S = 4.0            # between the first failure and SIGKILL for ranks that ignore SIGTERM


class Watch:
    """`sink` is told output(rank, stream, bytes) and, once, failed(rank, status, last lines); ranks are those of the whole job. Once its
    `reader_gone` is true the ranks are ended. `both_streams`: watch their standard output too."""

    def __init__(self, plan, sink, both_streams):
        self.started_read, self.started_write = os.pipe()
        streams = (1, 2) if both_streams else (2,)               # else the ranks keep this process's standard output
        self.pipes = {(local, stream): os.pipe() for local in range(plan.ranks) for stream in streams}
        self.first = None                                        # (local rank, exit status) of the first failure here
        self.pids = {}
        self._plan, self._sink = plan, sink
        self._tails = [collections.deque() for _ in range(plan.ranks)]
        self._alive = {}                                         # local rank -> pidfd
        self._unsure = []                                        # (local rank, status) of ends that may be a failure's consequence, or none
        self._wake_read, self._wake_write = os.pipe()
        self._ending_at = None                                   # when the first failure was seen, or the ranks were told to end
        self._told_to_end, self._killed = set(), False
        self._thread = threading.Thread(target=self._run, name="unshard-watch", daemon=True)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.started_read, selectors.EVENT_READ, ("started", None))
        self._selector.register(self._wake_read, selectors.EVENT_READ, ("wake", None))
        for source, (read, _) in self.pipes.items():
            os.set_blocking(read, False)
            self._selector.register(read, selectors.EVENT_READ, ("output", source))

    def start(self):
        self._thread.start()

    def stop(self):
        """Read what is left in the pipes, then end the thread."""
        if self._thread.is_alive():
            os.write(self._wake_write, b".")
            self._thread.join()
        for source in self.pipes:
            self._relay(source)
        fds = [self.started_read, self.started_write, self._wake_read, self._wake_write, *self._alive.values()]
        for fd in fds + [fd for pipe in self.pipes.values() for fd in pipe]:
            os.close(fd)
        self._selector.close()

    def _run(self):
        try:
            self._watch()
        except BaseException:                    # ranks whose pipes nobody reads would wait for ever
            self.kill()
            raise

    def _watch(self):
        while True:
            events = self._selector.select(timeout=0.25)
            for key, _ in events:
                kind, what = key.data
                if kind == "wake":
                    return
                if kind == "started":
                    self._add_ranks()
                elif kind == "output":
                    self._relay(what)
                else:
                    self._ended(what)
            if not events:
                self._sink.idle()
            if self._sink.reader_gone:
                self._ending_at = self._ending_at or time.monotonic()
                self._signal(signal.SIGTERM, self._alive.keys() - self._told_to_end)
            if self._ending_at and not self._killed and time.monotonic() > self._ending_at + GRACE_S:
                self.kill()

    def kill(self):
        self._killed = True
        self._signal(signal.SIGKILL, set(self._alive))

    def _signal(self, number, ranks):
        self._told_to_end |= ranks
        for rank in ranks:
            try:
                os.killpg(self.pids[rank], number)               # it leads its session, and its pidfd says that it lives
            except ProcessLookupError:
                pass

    def _add_ranks(self):
        for line in os.read(self.started_read, 4096).decode().splitlines():     # one write of under PIPE_BUF bytes a rank
            rank, pid = map(int, line.split())
            self.pids[rank] = pid
            try:
                self._alive[rank] = os.pidfd_open(pid)
            except ProcessLookupError:
                self._unsure.append((rank, None))                # already reaped by the agent
                continue
            self._selector.register(self._alive[rank], selectors.EVENT_READ, ("ended", rank))

    def _ended(self, rank):
        fd = self._alive.pop(rank)
        self._selector.unregister(fd)
        status = exit_status(fd)
        os.close(fd)
        for source in self.pipes:
            if source[0] == rank:
                self._relay(source)                              # its last words before anyone else's
        if status is None or (self._unsure and status in (-signal.SIGTERM, -signal.SIGKILL)):
            self._unsure.append((rank, status))                  # reaped by the agent first; or perhaps ended by it because of that one
        elif status != 0:
            self._failed(rank, status)

    def settle(self, codes):
        """When the agent has told how ranks of the job failed, in {rank: status}: decide about those that the watch isn't sure of."""
        for rank, status in self._unsure:
            status = codes.get(self._plan.first_rank + rank, 0) if status is None else status
            if status != 0:
                self._failed(rank, status)

    def _failed(self, rank, status):
        if self.first is None:
            self.first = (rank, status)
            self._ending_at = self._ending_at or time.monotonic()
            self._sink.failed(self._plan.first_rank + rank, status, self._tail(rank))

    def _relay(self, source):
        rank, stream = source
        while True:
            try:
                chunk = os.read(self.pipes[source][0], 64 << 10)
            except (BlockingIOError, OSError):
                return
            if not chunk:
                return
            if stream == 2:
                tail = self._tails[rank]
                tail.append(chunk)
                while sum(map(len, tail)) - len(tail[0]) > KEPT_BYTES:
                    tail.popleft()
            self._sink.output(self._plan.first_rank + rank, stream, chunk)

    def _tail(self, rank):
        """The rank's last lines, where others may have talked over them or they went to a file."""
        if self._plan.log_dir:
            try:
                with open(os.path.join(self._plan.log_dir, f"rank{self._plan.first_rank + rank}.log"), "rb") as file:
                    text = file.read()[-KEPT_BYTES:]
            except OSError:
                return []
        elif self._plan.world > 1:
            text = b"".join(self._tails[rank])
        else:
            return []
        return [line for line in text.decode(errors="replace").splitlines() if line.strip()][-TAIL_LINES:]


def write_all(fd, data):
    data = memoryview(data)
    while data:
        try:
            data = data[os.write(fd, data):]
        except BlockingIOError:                  # whoever shares the descriptor made it so
            room = select.poll()
            room.register(fd, select.POLLOUT)
            room.poll()
