"""Ports of rank 0's host."""
import socket

from unshard.launcher.errors import LaunchError

DEFAULT_PORT = 29500


def check_port(asked):
    if asked is not None and not 0 < asked < 65536:
        raise LaunchError(f"--master_port={asked} is not a port; it must be 1 to 65535")


def port_is_free(port):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            return True
        except OSError:
            return False


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def choose_port(asked, notes):
    """The port to use on this host."""
    check_port(asked)
    return settle_port(asked, usable_port(asked), notes)


def usable_port(asked):
    """The port asked for (or the default) if it is free, else a free one."""
    wanted = asked or DEFAULT_PORT
    return wanted if port_is_free(wanted) else free_port()


def settle_port(asked, usable, notes):
    """The port to use, where rank 0's host says that `usable` is: a port asked for must be free, the default one need not be."""
    if asked is not None and usable != asked:
        raise LaunchError(f"--master_port={asked} is taken or not allowed; give another, or none to have a free one chosen")
    if usable != (asked or DEFAULT_PORT):
        notes.append(f"port {DEFAULT_PORT} is taken: using {usable}")
    return usable
