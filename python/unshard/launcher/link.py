"""The launcher's end of the line to one host: to the ssh process that runs node.py there, to node.py itself here, or a TCP connection."""
import collections
import os
import subprocess

from unshard.launcher.frames import Unpacker, pack
from unshard.launcher.watch import write_all

ERROR_LINES = 20
STATED_BY_HOST_0 = ("first_rank", "world", "node_rank", "nodes", "master_addr", "master_port", "run_id", "attempt", "max_restarts")
# Of what comes over the network: the types of what the hub reads.
SHAPES = {"hello": {"protocol": int, "unshard": str, "torch": (str, type(None)), "python": str, "machine": str},
          "failed": {"rank": int, "status": int, "tail": list}, "done": {"codes": dict, "stopped": (int, type(None))},
          "gone": {"code": (int, type(None)), "last": str}, "interrupted": {"signal": int}, "refused": {"words": str},
          "order": {name: object for name in STATED_BY_HOST_0}, "stop": {}, "kill": {}, "end": {"code": int, "again": bool, "words": str}}


class ProcessLink:
    """Frames over the process's standard input and output; its standard error is for people."""

    def __init__(self, host, argv, what):
        self.host, self.what, self.argv = host, what, argv       # what: "ssh" or "python", for messages
        # In a session of its own: Ctrl-C is for the launcher, which ends this one in order.
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        self.read_fd, self.error_fd = self._process.stdout.fileno(), self._process.stderr.fileno()
        self.error_tail = collections.deque(maxlen=ERROR_LINES)
        self._write_fd, self._open = self._process.stdin.fileno(), True
        self._unpacker = Unpacker()

    def receive(self):
        """[(fields, payload) or (None, noise)], or None at the end."""
        return receive(self.read_fd, self._unpacker)

    def send(self, kind, **fields):
        send(self, self._write_fd, kind, fields)

    def give_order(self, order):
        self.send("order", **order)

    def hang_up(self):
        """The host's side takes the end of its input as the order to end everything."""
        if self._open:
            self._open = False
            self._process.stdin.close()

    @property
    def open(self):
        return self._open

    def code(self, wait_s=0.0):
        """The process's exit code, None while it runs."""
        try:
            return self._process.wait(wait_s) if wait_s else self._process.poll()
        except subprocess.TimeoutExpired:
            return None

    def broke(self, code):
        """The process ended with this code: not because node.py on the host did."""
        return self.what == "ssh" and code is not None and (code < 0 or code == 255)

    def close(self):
        """End the process, if it hasn't ended."""
        self.hang_up()
        if self.code(0.2) is None:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._process.stderr.close()


class SocketLink:
    """Frames over a TCP connection to a host where the command was given by hand or by another tool: see meeting.py.

    Anyone on the network can read along, so nothing secret goes this way: no arguments, no environment."""

    def __init__(self, host, connection, unpacker):
        self.host, self.what = host, "the connection"
        self.read_fd, self.error_fd, self.error_tail = connection.fileno(), None, ()
        self.open = True
        self._connection, self._unpacker = connection, unpacker

    def receive(self):
        items = receive(self.read_fd, self._unpacker)
        return items if items is None or all(has_shape(fields) for fields, _ in items) else None

    def send(self, kind, **fields):
        send(self, self.read_fd, kind, fields)

    def give_order(self, order):
        self.send("order", **{name: order[name] for name in STATED_BY_HOST_0})

    def hang_up(self):
        if self.open:
            self.open = False
            try:
                self._connection.shutdown(1)
            except OSError:
                pass

    def code(self, wait_s=0.0):
        return None

    def broke(self, code):
        return True

    def close(self):
        self.hang_up()
        self._connection.close()


def has_shape(fields):
    shape = fields and SHAPES.get(fields["kind"])
    return shape is not None and all(name in fields and isinstance(fields[name], kind) for name, kind in shape.items())


def receive(fd, unpacker):
    try:
        data = os.read(fd, 256 << 10)
    except OSError:
        data = b""
    if data:
        try:
            return unpacker.feed(data)
        except (ValueError, KeyError, TypeError):
            return None                          # no frame of ours looks like that
    rest = unpacker.rest()
    return [(None, rest)] if rest else None


def send(link, fd, kind, fields):
    if link.open:
        try:
            write_all(fd, pack(kind, **fields))
        except OSError:
            pass                                 # reading from it tells the same
