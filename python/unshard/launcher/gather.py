"""Host 0's side of a meeting (see meeting.py): it listens on the master port until every other host has joined.

Others may knock there too, so nobody is waited for alone: each connection has JOIN_S for its first frame, and whatever isn't a join of
this job is closed. Where there is a secret a join must prove that it knows it. Nothing that travels later is one either: see SocketLink.
"""
import dataclasses
import hmac
import json
import select
import socket
import time

from unshard.launcher.errors import LaunchError
from unshard.launcher.frames import Unpacker
from unshard.launcher.link import SocketLink
from unshard.launcher.ports import DEFAULT_PORT

MEETING_S = 900          # until all hosts must have come; they may wait in a cluster's queue
JOIN_S = 10              # from a connection to its first frame
JOIN_BYTES = 64 << 10    # no join is longer
MOST_STRANGERS = 128     # connections without a join; beyond, the oldest goes
HUNG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR
NUMBERS = ("node_rank", "nodes")


def proof(secret, join):
    """Shows that the sender of this join knows the secret, which itself doesn't travel."""
    said = json.dumps([join[name] for name in ("node_rank", "nodes", "hostname", "slots")])
    return hmac.new(secret.encode(), said.encode(), "sha256").hexdigest() if secret else ""


def keep_alive(connection):
    """A host that lost its network or its power is given up after 20 s."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3), (socket.TCP_USER_TIMEOUT, 20000)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def gather(plan, voice):
    """{number of a host: link to it}, once all have come. Fills in the plan's port, shares and ranks."""
    plan.master_port = plan.master_port or DEFAULT_PORT
    with listen(plan.master_port) as listener:
        gathering = Gathering(plan, voice, listener)
        try:
            gathering.run(time.monotonic() + MEETING_S)
        except BaseException as error:
            gathering.dismiss(str(error) if isinstance(error, LaunchError) else "host 0 was ended before all had come")
            raise
    for node, visitor in gathering.joined.items():
        share = plan.shares[node]
        if share.slots is None:
            share.host, share.slots = f"{visitor.join['hostname']} (host {node})", visitor.join["slots"]
    plan.number()
    return {node: SocketLink(plan.shares[node].host, visitor.connection, Unpacker()) for node, visitor in gathering.joined.items()}


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


@dataclasses.dataclass(eq=False)
class Visitor:
    connection: socket.socket
    end: float               # when its join must be here
    unpacker: Unpacker = dataclasses.field(default_factory=Unpacker)
    read: int = 0            # bytes
    join: dict | None = None

    def read_join(self):
        """The first frame's fields when they are here, else None. Raises ValueError for what is no join, OSError for a dead connection."""
        while True:
            try:
                data = self.connection.recv(1)   # no byte more than this frame: what follows is the link's
            except BlockingIOError:
                return None
            self.read += 1
            if not data or self.read > JOIN_BYTES:
                raise ValueError
            for fields, _ in self.unpacker.feed(data):
                return checked(fields)


def checked(join):
    """The fields if they are a whole join's, else ValueError."""
    join = join or {}
    slots, name = join.get("slots"), join.get("hostname")
    if (join.get("kind") != "join" or any(type(join.get(field)) is not int for field in NUMBERS)
            or type(name) is not str or not 0 < len(name) < 256 or not name.isprintable()
            or type(slots) is not list or not slots or any(type(slot) is not int or slot < 0 for slot in slots)
            or type(join.get("proof", "")) is not str):
        raise ValueError
    return join


class Gathering:
    def __init__(self, plan, voice, listener):
        self.plan, self.voice, self.listener = plan, voice, listener
        self.missing = set(range(1, len(plan.shares)))
        self.joined = {}                         # {number of the host: Visitor}
        self._strangers = {}                     # {descriptor: Visitor}, the oldest first
        self._poll = select.poll()
        listener.setblocking(False)
        self._poll.register(listener, select.POLLIN)

    def run(self, end):
        self.voice.say(f"waiting on port {self.plan.master_port} for {len(self.missing)} more host{'s' * (len(self.missing) > 1)}")
        while self.missing:
            now = time.monotonic()
            if now > end:
                raise LaunchError(f"--node_rank {', '.join(map(str, sorted(self.missing)))} didn't come within {MEETING_S} s")
            for visitor in [visitor for visitor in self._strangers.values() if now > visitor.end]:
                self._send_away(visitor)
            wake = min([end, *(visitor.end for visitor in self._strangers.values())])
            for fd, _ in self._poll.poll(max(1, 1000 * (wake - now))):
                if fd == self.listener.fileno():
                    self._welcome()
                elif fd in self._strangers:
                    self._hear(self._strangers[fd])
                else:
                    self._left(fd)
        for visitor in list(self._strangers.values()):
            self._send_away(visitor)

    def dismiss(self, words):
        """It comes to nothing: tell those that have come."""
        for visitor in self.joined.values():
            link = SocketLink("", visitor.connection, Unpacker())
            link.send("end", code=2, again=False, words=words)
            link.close()
        for visitor in list(self._strangers.values()):
            self._send_away(visitor)

    def _welcome(self):
        try:
            connection, _ = self.listener.accept()
        except OSError:                          # it has gone again, or there are too many files open
            time.sleep(0.01)
            return
        connection.setblocking(False)
        self._strangers[connection.fileno()] = Visitor(connection, time.monotonic() + JOIN_S)
        self._poll.register(connection, select.POLLIN)
        if len(self._strangers) > MOST_STRANGERS:
            self._send_away(next(iter(self._strangers.values())))

    def _send_away(self, visitor):
        self._strangers.pop(visitor.connection.fileno())
        self._poll.unregister(visitor.connection)
        visitor.connection.close()

    def _hear(self, visitor):
        try:
            join = visitor.read_join()
            words = join and self._objection(join)
        except (OSError, ValueError, KeyError, TypeError):
            self._send_away(visitor)
            return
        if join is None:
            return
        if words:
            SocketLink("", visitor.connection, Unpacker()).send("end", code=2, again=False, words=words)
            self._send_away(visitor)
            return
        visitor.join = join
        self._strangers.pop(visitor.connection.fileno())
        visitor.connection.setblocking(True)
        keep_alive(visitor.connection)
        self._poll.modify(visitor.connection, HUNG_UP)       # what it says from now on is for the link
        self.missing.discard(join["node_rank"])
        self.joined[join["node_rank"]] = visitor

    def _objection(self, join):
        if self.plan.secret and not hmac.compare_digest(join.get("proof", "").encode(), proof(self.plan.secret, join).encode()):
            return "this host doesn't know the job's secret; set UNSHARD_MEETING_SECRET to the same on all hosts"
        if join["nodes"] != len(self.plan.shares):
            return f"host 0 was started for {len(self.plan.shares)} hosts, this one for {join['nodes']}"
        if join["node_rank"] not in self.missing:
            return f"there is another host with --node_rank={join['node_rank']}"
        return None

    def _left(self, fd):
        node, visitor = next((node, visitor) for node, visitor in self.joined.items() if visitor.connection.fileno() == fd)
        self._poll.unregister(visitor.connection)
        visitor.connection.close()
        del self.joined[node]
        self.missing.add(node)
        words = f"{visitor.join['hostname']} (host {node}) has left before all had come"
        if self.plan.by_tool:                    # which doesn't start it a second time
            raise LaunchError(words)
        self.voice.warn(f"{words}; waiting until it comes again")
