"""Runs one attempt at a job on several hosts: asks all for their hello, gives the orders, and ends everything when one rank fails."""
import os
import selectors
import signal
import time

from unshard.launcher.errors import LaunchError
from unshard.launcher.outlet import Outlet
from unshard.launcher.signals import signals_to
from unshard.launcher.watch import GRACE_S

KILL_S = GRACE_S + 0.3       # after "stop": the hosts' own grace has passed, and what is left is killed
GIVE_UP_S = GRACE_S + 0.8    # after "stop": a host that hasn't even answered that is left to the end of its input
OTHERS_S = 1.0               # after the first host that can't do its part has said so, until the others have


class Interrupted(Exception):
    """A signal arrived before there was anything to end."""

    def __init__(self, number):
        super().__init__(signal.Signals(number).name)
        self.number = number


class Hub:
    """Used in this order: hellos(), start(orders, report), finish(...). `report` is told what the ranks say and how they fail."""

    def __init__(self, links, outlet=None):
        self.links = links
        self.answers = {}                        # {host: hello}
        self.codes = {}                          # {rank: exit status} of ranks that failed
        self.silent = []                         # hosts whose command ended well without saying anything that could be read
        self.refusals = {}                       # {host: why it can't do its part}
        self.lost = {}                           # {host: how we know}: what becomes of its ranks can't be told from here
        self.interrupted = None                  # signal number
        self._report, self._outlet = None, outlet or Outlet()
        self._selector = selectors.DefaultSelector()
        self._alive, self._done = set(), set()   # links: not at their end; all their ranks have ended
        self._stopped_at = None
        self._killed = self._hurried = False
        self._signals = signals_to(self._on_signal)
        for link in links:
            self._alive.add(link)
            self._selector.register(link.read_fd, selectors.EVENT_READ, (link, "frames"))
            if link.error_fd is not None:
                self._selector.register(link.error_fd, selectors.EVENT_READ, (link, "errors"))

    def __enter__(self):
        self._signals.__enter__()
        return self

    def __exit__(self, *_):
        for link in self.links:
            link.hang_up()
        for link in self.links:
            link.close()
        self._selector.close()
        self._signals.__exit__(None, None, None)

    def _on_signal(self, number, _):
        if self.interrupted is not None:         # the second time: at once
            self._hurried = True
            self._stopped_at = self._stopped_at and time.monotonic() - GIVE_UP_S
        self.interrupted = self.interrupted or number

    # ---- before

    def hellos(self, limit_s):
        """Wait until every host has answered. Raises LaunchError for hosts that can't be reached or can't run node.py."""
        end, patience = time.monotonic() + limit_s, None
        while late := [link.host for link in self._alive if link.host not in self.answers]:
            self._turn(0.1)
            if self.interrupted:
                raise Interrupted(self.interrupted)
            if self.refusals:
                patience = patience or time.monotonic() + OTHERS_S       # to name all that can't be reached
                end = min(end, patience)
            if time.monotonic() > end:
                break
        if self.refusals:
            raise LaunchError(self.why_refused())
        if late:
            raise LaunchError(f"no answer from {', '.join(late)} within {limit_s:g} s")
        if self.silent and len(self.silent) < len(self.links):
            raise LaunchError(f"{', '.join(self.silent)} answered nothing that can be read, and ended: no ranks can be started there")

    def why_refused(self):
        return "; ".join(f"{host}: {words}" for host, words in self.refusals.items())

    # ---- the attempt

    def start(self, orders, report):
        """`orders`: {host: order}. Returns when no rank is left anywhere."""
        self._report = report
        for link in self._alive:
            link.give_order(orders[link.host])
        while self._alive - self._done:
            self._turn(0.25)
            self._decide()

    def finish(self, code, again, words):
        """Let the hosts go: those of a meeting end with this code, or come again for the next attempt."""
        for link in self._alive:
            link.send("end", code=code, again=again, words=words)
            link.hang_up()

    def _decide(self):
        if self._stopped_at is None:
            if self.interrupted or self.refusals or self._report.any_failure or self._report.reader_gone:
                self._stopped_at = time.monotonic()
                for link in self._alive:
                    link.send("stop")
            return
        passed = time.monotonic() - self._stopped_at
        if passed > KILL_S and not self._killed:
            self._killed = True
            for link in self._alive - self._done:
                link.send("kill")
        if passed > GIVE_UP_S:
            for link in self._alive - self._done:
                self.lost[link.host] = "it hadn't answered at the second signal" if self._hurried else f"no answer within {passed:.0f} s"
                link.hang_up()
            self._done |= self._alive

    def _turn(self, timeout):
        events = self._selector.select(timeout)
        for key, _ in events:
            link, what = key.data
            if what == "errors":
                self._hear_errors(link, key.fd)
                continue
            items = link.receive()
            if items is None:
                self._selector.unregister(key.fd)
                self._at_end(link)
            for fields, payload in items or ():
                self._hear(link, fields, payload)
        if not events and self._report:
            self._report.idle()

    def _hear(self, link, fields, payload):
        if fields is None:
            self._show(link, payload)
            return
        kind = fields["kind"]
        if kind == "output":
            self._report.output(fields["rank"], fields["stream"], payload)
        elif kind == "failed":
            self._report.failed(fields["rank"], fields["status"], fields["tail"])
        elif kind == "hello":
            self.answers[link.host] = fields
        elif kind == "done":
            self._done.add(link)
            self.codes.update({int(rank): status for rank, status in fields["codes"].items()})
            if fields["codes"] and not self._report.any_failure:
                rank, status = next(iter(sorted(self.codes.items())))
                self._report.failed(rank, status, [])
            if fields["stopped"] and self._stopped_at is None:
                self._report.host_failed(f"{link.host}: its ranks were ended by {signal.Signals(fields['stopped']).name} from outside")
        elif kind == "gone":                     # of a meeting: the host's part has ended, the line to it is still there
            self._part_ended(link, fields["code"], fields["last"])
        elif kind == "interrupted":
            self.interrupted = self.interrupted or fields["signal"]
        elif kind == "refused":
            self.refusals[link.host] = fields["words"]

    def _at_end(self, link):
        """The line is dead."""
        self._alive.discard(link)
        code = link.code(1.0)
        if link.error_fd is not None:
            self._hear_errors(link, link.error_fd, last=True)
        self._part_ended(link, code, link.error_tail[-1] if link.error_tail else "", link.broke(code))

    def _part_ended(self, link, code, last, broke=False):
        """In order after the end of the host's ranks or a stop; else it is news. `broke`: the line did, not what is at its end."""
        expected = link in self._done or self._stopped_at is not None or link.host in self.refusals
        last = f": {last}" if last else ""
        how = (f"{link.what} ended with code {code}" if code is not None else f"{link.what} was closed") + last
        if broke and self._report and link not in self._done and link.host not in self.refusals:
            self.lost[link.host] = how
        self._done.add(link)
        if expected:
            return
        if self._report:
            self._report.host_failed(f"{link.host} is lost: {how}")
        elif link.host in self.answers:
            self.refusals[link.host] = f"is lost: {how}"
        elif code == 0:
            self.silent.append(link.host)
        elif code == 255 and link.what == "ssh":
            self.refusals[link.host] = f"can't be reached{last}"
        else:
            self.refusals[link.host] = f"can't start unshard's launcher ({how})"

    def _hear_errors(self, link, fd, last=False):
        text = b""
        while data := _read_now(fd):
            text += data
            if not last:
                break
        if not text and not last and fd in self._selector.get_map():
            self._selector.unregister(fd)
        lines = [line for line in text.decode(errors="replace").splitlines() if line.strip()]
        link.error_tail.extend(lines)
        if self._report:                         # before, it goes into the message that says what is wrong
            self._show(link, text)

    def _show(self, link, text):
        if self._report:
            self._report.printer.end_line()
        prefix = f"[{link.host}] ".encode()
        self._outlet.write(2, b"".join(prefix + line + b"\n" for line in text.splitlines() if line.strip()))


def _read_now(fd):
    os.set_blocking(fd, False)
    try:
        return os.read(fd, 64 << 10)
    except (BlockingIOError, OSError):
        return b""
