"""Several hosts, each given the command itself (by hand, or by pdsh, slurm, mpirun): they meet on the master port.

Host 0 listens there, and closes it when all have come; then the ranks' store takes the port. The connections stay, as the lines of the hub
on host 0 (gather.py). Each other host relays between its connection and its own node.py, shows its own ranks' output, and runs what its
own command says: from host 0 come ranks, addresses and the end only.
"""
import os
import selectors
import signal
import socket
import sys
import time

from unshard.launcher.connect import node_words
from unshard.launcher.errors import LaunchError
from unshard.launcher.frames import Unpacker
from unshard.launcher.gather import MEETING_S, gather, keep_alive, proof
from unshard.launcher.hub import Interrupted
from unshard.launcher.link import STATED_BY_HOST_0, ProcessLink, SocketLink
from unshard.launcher.ports import DEFAULT_PORT
from unshard.launcher.report import Printer
from unshard.launcher.signals import signals_to

HOST_0_S = 6.0           # after a signal that host 0 was told of, until it must have ended all


def start_node(plan, node):
    return ProcessLink(plan.shares[node].host, [sys.executable, *node_words(plan, node)], "python")


# ---- host 0

def links_of_meeting(plan, voice):
    """Links to all hosts, once all have come."""
    others = gather(plan, voice)
    return [start_node(plan, 0)] + [others[node] for node in sorted(others)]


# ---- the others

def take_part(plan, voice):
    """(exit code, come again for another attempt) of a host other than host 0."""
    with connect(plan) as connection:
        node = start_node(plan, plan.node_rank)
        relay = Relay(SocketLink("host 0", connection, Unpacker()), node, plan, voice.outlet)
        with signals_to(relay.on_signal):
            try:
                end = relay.run()
            finally:
                node.close()
                relay.printer.close()
    if end is None:
        raise LaunchError("host 0 is lost: its connection was closed")
    if end["words"] and not voice.outlet.reader_gone:
        voice.say(end["words"] if relay.ended_alone else f"the end, says host 0: {end['words']}")
    return end["code"], end["again"]


def connect(plan):
    address, port = plan.master_addr or plan.shares[0].host, plan.master_port or DEFAULT_PORT
    end = time.monotonic() + MEETING_S
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=10)
            connection.settimeout(None)
            keep_alive(connection)
            return connection
        except OSError as error:                 # it isn't listening yet
            if time.monotonic() > end:
                raise LaunchError(f"can't reach host 0 at {address}:{port}: {error}") from None
            time.sleep(0.2)


class Relay:
    def __init__(self, hub, node, plan, outlet):
        self.hub, self.node, self.plan, self.outlet = hub, node, plan, outlet
        self.printer = Printer(not plan.task["no_prefix"], outlet)
        self._signals = []
        self._ordered = False
        self._told_at = None
        self.ended_alone = False

    def on_signal(self, number, _):
        self._signals.append(number)

    def run(self):
        """Returns host 0's "end", or None when it is lost; the node is then at its end, or told so."""
        share = self.plan.shares[self.plan.node_rank]
        join = {"node_rank": self.plan.node_rank, "nodes": len(self.plan.shares), "slots": share.slots, "hostname": socket.gethostname()}
        self.hub.send("join", **join, proof=proof(self.plan.secret, join))
        with selectors.DefaultSelector() as selector:
            selector.register(self.hub.read_fd, selectors.EVENT_READ, self._from_hub)
            selector.register(self.node.read_fd, selectors.EVENT_READ, self._from_node)
            selector.register(self.node.error_fd, selectors.EVENT_READ, self._from_node_errors)
            while True:
                events = selector.select(0.25)
                if not events:
                    self.printer.flush(0.25)
                for key, _ in events:
                    end = key.data(selector, key.fd)
                    if end is not None:
                        self.node.hang_up()
                        return end or self._lost()
                if self.outlet.reader_gone and not self._signals:
                    self._signals.append(signal.SIGPIPE)     # as it would be for a program that doesn't ignore it
                if self._signals and (end := self._interrupted()):
                    self.node.hang_up()
                    self.node.code(5.5)
                    return end

    def _interrupted(self):
        """Host 0 ends the job on all hosts. Before there is one, where it doesn't, or at the second signal, this host ends alone."""
        number = self._signals[0]
        if not self._ordered:
            raise Interrupted(number)
        if self._told_at is None:
            self._told_at = time.monotonic()
            self.hub.send("interrupted", signal=number)
        if len(self._signals) == 1 and time.monotonic() < self._told_at + HOST_0_S:
            return None
        self.ended_alone = True
        return {"code": 128 + number, "again": False, "words": f"{signal.Signals(number).name}: the ranks of this host were ended"}

    def _lost(self):
        self.node.code(5.5)                      # it ends its ranks first
        return None

    def _from_hub(self, selector, fd):
        items = self.hub.receive()
        if items is None:
            return {}
        for fields, _ in items:
            kind = fields and fields.pop("kind")
            if kind == "order":
                stated = {name: fields[name] for name in STATED_BY_HOST_0}
                self._ordered = True
                self.node.send("order", **self.plan.order_of_meeting(stated))
            elif kind in ("stop", "kill"):
                self.node.send(kind)
            elif kind == "end":
                self.node.send("end")
                return fields
        return None

    def _from_node(self, selector, fd):
        items = self.node.receive()
        if items is None:
            selector.unregister(fd)
            code = self.node.code(1.0)
            self.hub.send("gone", code=code, last=self.node.error_tail[-1] if self.node.error_tail else "")
        for fields, payload in items or ():
            if fields is None:
                self.outlet.write(2, payload)
            elif fields["kind"] == "output":
                self.printer.write(fields["rank"], fields["stream"], payload)
            else:
                kind = fields.pop("kind")
                self.hub.send(kind, **{name: value for name, value in fields.items() if name != "size"})
        return None

    def _from_node_errors(self, selector, fd):
        data = os.read(fd, 64 << 10)
        if not data:
            selector.unregister(fd)
        self.node.error_tail.extend(line for line in data.decode(errors="replace").splitlines() if line.strip())
        self.outlet.write(2, data)
        return None
