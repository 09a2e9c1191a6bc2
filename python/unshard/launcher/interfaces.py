"""Which network interface leads to the other hosts. Gloo would ask for the host's own name, which fails in many clusters and containers."""
import fcntl
import socket
import struct

SIOCGIFADDR = 0x8915


def interface_towards(address):
    """Name of the interface from which this host reaches `address` (its own, on that host); None where that can't be told."""
    try:
        own = own_address_towards(address)
        return interface_of(own)
    except OSError:
        return None


def own_address_towards(address):
    """This host's address, as `address` sees it. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return probe.getsockname()[0]


def interface_of(own):
    """Name of the interface with this IPv4 address, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue                     # an interface without an address
            if socket.inet_ntoa(found[20:24]) == own or (name == "lo" and own.startswith("127.")):
                return name
    return None


def is_here(host):
    """Does this name or address belong to this machine? May look it up in the network."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
        except OSError:
            pass
    return False
