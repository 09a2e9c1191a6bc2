"""What the user sees of a job: the ranks' lines, each with its rank, and at the end who failed first and what it said."""
import collections
import signal
import time

from unshard.launcher.outlet import Outlet
from unshard.streams import BROKEN_PIPE, has_no_reader

HELD_BYTES = 256 << 10       # kept of what a rank says after another one has failed
IDLE_S = 0.25                # after which a line without an end is shown as it is (a prompt, a progress bar)


class Printer:
    """Lines to the terminal, whole, each with its rank in front."""

    def __init__(self, prefixed, outlet=None):
        self.prefixed, self.outlet = prefixed, outlet or Outlet()
        self._partial = {}                       # (rank, stream) -> bytes of a line that hasn't ended
        self._open = None                        # whose unended line stands on the terminal
        self._last = time.monotonic()

    def write(self, rank, stream, data):
        if not self.prefixed:
            self.outlet.write(stream, data)
            return
        self._last = time.monotonic()
        source = (rank, stream)
        whole, newline, rest = (self._partial.pop(source, b"") + data).rpartition(b"\n")
        if newline:
            self._show(source, whole.split(b"\n"), b"\n")
        if rest:
            self._partial[source] = rest

    def flush(self, idle_s=0.0):
        """Show what has waited that long for the end of its line."""
        if self._partial and time.monotonic() - self._last >= idle_s:
            for source in list(self._partial):
                self._show(source, [self._partial.pop(source)], b"")

    def close(self):
        """Show all that came, and leave the terminal at the beginning of a line."""
        self.flush()
        self.end_line()

    def end_line(self):
        if self._open:
            self.outlet.write(self._open[1], b"\n")
            self._open = None

    def _show(self, source, lines, end):
        prefix = f"[rank {source[0]}] ".encode()
        text = b"".join(prefix + line.replace(b"\r", b"\r" + prefix) + b"\n" for line in lines)
        if self._open == source:
            text = text[len(prefix):]
        elif self._open:
            text = b"\n" + text
        self._open = None if end else source
        self.outlet.write(source[1], text if end else text[:-1])


class Report:
    """Fed by the watch of this machine's ranks, or by the hub with what all hosts say."""

    def __init__(self, world, prefixed, host_of=None, outlet=None):
        self.world, self.host_of = world, host_of
        self.printer = Printer(prefixed, outlet)
        self._outlet = self.printer.outlet
        self.first = None                        # (rank, exit status or None, its last lines, time) of the first failure
        self.host_failure = None                 # words, where a host failed before any rank did
        self.headline = ""                       # the first line of the conclusion
        self._held = collections.defaultdict(list)
        self._begin = time.monotonic()

    @property
    def reader_gone(self):
        """Nobody reads any more what the ranks say: they are to end."""
        return self._outlet.reader_gone

    def output(self, rank, stream, data):
        if self.reader_gone:
            return
        if self.first and rank != self.first[0]:
            held = self._held[rank]
            held.append(data)
            while sum(map(len, held)) - len(held[0]) > HELD_BYTES:
                held.pop(0)
        else:
            self.printer.write(rank, stream, data)

    def idle(self):
        self.printer.flush(IDLE_S)

    def failed(self, rank, status, tail):
        if not self.any_failure and not self.reader_gone:        # else it is a consequence
            self.first = (rank, status, tail, time.monotonic())

    def host_failed(self, words):
        if not self.any_failure and not self.reader_gone:
            self.host_failure = words

    @property
    def any_failure(self):
        return self.first is not None or self.host_failure is not None

    def conclude(self, codes, lost=None):
        """Print the end of the job and return its exit code. `codes`: {rank: exit status} as the agents have them. `lost`: {host: why}."""
        if not self.any_failure and any(codes.values()):
            rank = min(rank for rank, status in codes.items() if status)
            self.failed(rank, codes[rank], [])
        self.printer.close()
        if not self.any_failure and self.reader_gone or self.first and self._met_broken_pipe(*self.first[:2]):
            self.headline = "nobody reads any more what the ranks say: all were ended"
            return BROKEN_PIPE
        code = 0
        if self.first:
            code = self._conclude_rank(codes, lost or {})
        elif self.host_failure is not None:
            code = 1
            self._print([self.host_failure, *self._of_lost(lost or {})])
        for rank, text in sorted(self._held.items()):
            self._print([f"rank {rank} said after that:"])
            self._outlet.write(2, b"".join(text))
        return code

    def tell_lost(self, lost):
        """Name the hosts whose ranks are out of reach. `lost`: {host: why}."""
        if lost:
            self._print(self._of_lost(lost))

    def _met_broken_pipe(self, rank, status):
        """The rank itself has this process's standard output, and wrote to it when there was no reader any more."""
        return status in (-signal.SIGPIPE, BROKEN_PIPE) and has_no_reader(1)

    def _of_lost(self, lost):
        for host, why in lost.items():
            line = f"{host} is lost: {why}"
            if line != self.host_failure:
                yield line
            there = [rank for rank in range(self.world) if self.host_of(rank) == host]
            yield f"rank {ranges(there)} on {host} couldn't be ended from here, and may still run there"

    def _conclude_rank(self, codes, lost):
        rank, status, tail, at = self.first
        status = codes.get(rank) if status is None else status
        lines = [f"{self.name(rank)} {how_it_ended(status)} after {at - self._begin:.1f} s"]
        ended = [other for other in range(self.world) if other != rank and not (lost and self.host_of(other) in lost)]
        if self.world > 1:
            lines[0] += ", before any other" + (f"; ended: rank {ranges(ended)}" if ended else "")
        lines += self._of_lost(lost)
        if tail:
            lines += [f"the last that rank {rank} said:"] + [f"  | {line}" for line in tail]
        self._print(lines)
        return 1 if status is None else status if status >= 0 else 128 - status

    def name(self, rank):
        return f"rank {rank} on {self.host_of(rank)}" if self.host_of else f"rank {rank}"

    def _print(self, lines):
        self.headline = self.headline or lines[0]
        self._outlet.write(2, "".join(f"[unshard run] {line}\n" for line in lines).encode())


def how_it_ended(status):
    if status is None:
        return "failed"
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"failed with exit code {status}"


def ranges(numbers):
    """[0, 1, 2, 5] -> '0-2, 5'"""
    parts = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}{', ' if last == first + 1 else '-'}{last}" for first, last in parts)
