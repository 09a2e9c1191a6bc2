"""Several hosts, each given the command itself (by hand, or by pdsh, slurm, mpirun): they meet on the master port.

Host 0 listens there, and closes it when all have come; then the ranks' store takes the port. The connections stay, as the lines of the hub
on host 0. Each other host relays between its connection and its own node.py, shows its own ranks' output, and runs what its own command
says: from host 0 come ranks, addresses and the end only.
"""
import os
import selectors
import socket
import sys
import time

from unshard.launcher.connect import node_words
from unshard.launcher.errors import LaunchError
from unshard.launcher.frames import Unpacker
from unshard.launcher.link import ProcessLink, SocketLink
from unshard.launcher.ports import DEFAULT_PORT
from unshard.launcher.report import Printer
from unshard.launcher.signals import signals_to
from unshard.launcher.watch import write_all

MEETING_S = 900          # until all hosts must have come; they may wait in a cluster's queue
JOIN_S = 10              # from a connection to its first frame; others may knock on the port too
STATED_BY_HOST_0 = ("first_rank", "world", "node_rank", "nodes", "master_addr", "master_port", "run_id", "attempt", "max_restarts")


def start_node(plan, node):
    return ProcessLink(plan.shares[node].host, [sys.executable, *node_words(plan, node)], "python")


# ---- host 0

def gather(plan, voice):
    """Links to all hosts, once all have come. Fills in the plan's shares."""
    port = plan.master_port or DEFAULT_PORT
    expected = set(range(1, len(plan.shares)))
    connections = {}
    with listen(port) as listener:
        voice.say(f"waiting on port {port} for {len(expected)} more host{'s' * (len(expected) > 1)}")
        end = time.monotonic() + MEETING_S
        try:
            while expected:
                listener.settimeout(max(0.01, end - time.monotonic()))
                connection, address = listener.accept()
                joined = join_of(connection, plan, expected)
                if joined is None:
                    connection.close()
                    continue
                node = joined["node_rank"]
                expected.discard(node)
                connections[node] = connection
                share = plan.shares[node]
                if share.slots is None:
                    share.host, share.slots = f"{joined['hostname']} (host {node})", joined["slots"]
        except TimeoutError:
            raise LaunchError(f"--node_rank {', '.join(map(str, sorted(expected)))} didn't come within {MEETING_S} s") from None
    plan.master_port = port
    plan.number()
    return [start_node(plan, 0)] + [SocketLink(plan.shares[node].host, connections[node], Unpacker()) for node in sorted(connections)]


def listen(port):
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)       # so that the store can take the port while the lines stay
    try:
        listener.bind(("", port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise LaunchError(f"can't listen on port {port}: {error.strerror}; give another --master_port on all hosts") from None
    return listener


def join_of(connection, plan, expected):
    """The first frame of a host that belongs here, else None."""
    connection.settimeout(JOIN_S)
    unpacker = Unpacker()
    try:
        while data := connection.recv(1):        # no byte more than this frame: what follows is the link's
            for fields, _ in unpacker.feed(data):
                if not fields or fields["kind"] != "join":
                    return None
                if fields["nodes"] != len(plan.shares) or fields["node_rank"] not in expected:
                    refuse(connection, fields, plan, expected)
                    return None
                connection.settimeout(None)
                keep_alive(connection)
                return fields
    except (OSError, ValueError, KeyError):
        pass
    return None


def refuse(connection, fields, plan, expected):
    words = (f"host 0 was started for {len(plan.shares)} hosts, this one for {fields['nodes']}" if fields["nodes"] != len(plan.shares)
             else f"there is another host with --node_rank={fields['node_rank']}")
    SocketLink("", connection, Unpacker()).send("end", code=2, again=False, words=words)


# ---- the others

def take_part(plan, voice):
    """(exit code, come again for another attempt) of a host other than host 0."""
    with connect(plan) as connection:
        node = start_node(plan, plan.node_rank)
        relay = Relay(SocketLink("host 0", connection, Unpacker()), node, plan)
        with signals_to(relay.on_signal):
            try:
                end = relay.run()
            finally:
                node.close()
                relay.printer.close()
    if end is None:
        raise LaunchError("host 0 is lost: its connection was closed")
    if end["words"]:
        voice.say(f"the end, says host 0: {end['words']}")
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


def keep_alive(connection):
    """A host that lost its network or its power is given up after 20 s."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3), (socket.TCP_USER_TIMEOUT, 20000)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Relay:
    def __init__(self, hub, node, plan):
        self.hub, self.node, self.plan = hub, node, plan
        self.printer = Printer(not plan.task["no_prefix"])
        self._signal = None
        self._told = False

    def on_signal(self, number, _):
        self._signal = number

    def run(self):
        """Returns host 0's "end", or None when it is lost; the node is then at its end, or told so."""
        share = self.plan.shares[self.plan.node_rank]
        self.hub.send("join", node_rank=self.plan.node_rank, nodes=len(self.plan.shares), slots=share.slots, hostname=socket.gethostname())
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
                if self._signal and not self._told:
                    self._told = True
                    self.hub.send("interrupted", signal=self._signal)

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
                write_all(2, payload)
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
        write_all(2, data)
        return None
