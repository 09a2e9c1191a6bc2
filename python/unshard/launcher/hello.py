"""What a host says of itself before anything is started there."""
import importlib.metadata
import os
import platform
import socket

from unshard.launcher.ports import usable_port

PROTOCOL = 1


def hello(asked_port, port_matters):
    """`port_matters`: this is rank 0's host, so find out whether the port is free."""
    import unshard

    client, _, server, _ = (os.environ.get("SSH_CONNECTION", "").split() + ["", "", "", ""])[:4]
    return {"protocol": PROTOCOL, "unshard": unshard.__version__, "torch": version_of("torch"), "python": platform.python_version(),
            "hostname": socket.gethostname(), "machine": machine(), "address": server, "launcher_address": client,
            "port": usable_port(asked_port) if port_matters else None}


def version_of(package):
    """Without importing it: the import takes seconds."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine():
    """Equal for two names of one machine (network namespaces count as machines of their own)."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip() + " " + os.readlink("/proc/self/ns/net")
    except OSError:
        return socket.gethostname()
