"""Interfaces, InfiniBand, and which of them Gloo and NCCL will use."""
import ipaddress
import re

LOOPBACK = 772          # ARPHRD_LOOPBACK
_KINDS = {1: "Ethernet", 32: "IP over InfiniBand", LOOPBACK: "loopback"}


def interfaces(machine):
    addresses = {}
    for name, address in machine.ipv4():
        addresses.setdefault(name, []).append(address)
    for line in machine.text("/proc/net/if_inet6").splitlines():
        digits, _, _, _, _, name = line.split()
        addresses.setdefault(name, []).append(str(ipaddress.ip_address(int(digits, 16).to_bytes(16, "big"))))
    return [_interface(machine, name, addresses.get(name, [])) for name in names(machine)]


def names(machine):
    """Of this network namespace. /sys may be mounted for another one; /proc/net never is."""
    listed = re.findall(r"^\s*([^\s:]+):", machine.text("/proc/net/dev"), re.MULTILINE)
    folder = "/sys/class/net"
    return sorted(listed) or [name for name in machine.folders(folder) if machine.number(f"{folder}/{name}/type") is not None]


def _interface(machine, name, addresses):
    folder = f"/sys/class/net/{name}"
    if not machine.path(folder).is_dir():
        kind = "loopback" if any(map(is_loopback, addresses)) else "kind unknown"
        return {"name": name, "kind": kind, "up": bool(addresses), "speed_mbit": None, "mtu": None, "physical": False,
                "addresses": addresses}
    speed = machine.number(f"{folder}/speed")
    up = bool((machine.number(f"{folder}/flags") or 0) & 1) and machine.text(f"{folder}/operstate") not in ("down", "lowerlayerdown")
    type_number = machine.number(f"{folder}/type")
    return {"name": name, "kind": _KINDS.get(type_number, f"type {type_number}"), "up": up,
            "speed_mbit": speed if speed and speed > 0 else None,       # unknown to many virtual ones
            "mtu": machine.number(f"{folder}/mtu"), "physical": machine.path(f"{folder}/device").exists(), "addresses": addresses}


def infiniband(machine):
    found = []
    for device in machine.folders("/sys/class/infiniband"):
        for port in machine.folders(f"/sys/class/infiniband/{device}/ports"):
            folder = f"/sys/class/infiniband/{device}/ports/{port}"
            found.append({"device": device, "port": int(port), "state": machine.text(f"{folder}/state").split(": ")[-1],
                          "rate": machine.text(f"{folder}/rate"), "link_layer": machine.text(f"{folder}/link_layer")})
    return found


def host_name(machine):
    """{name, addresses, error}: what this host's own name means to it."""
    name = machine.text("/proc/sys/kernel/hostname", "localhost")
    try:
        return {"name": name, "addresses": machine.resolve(name), "error": ""}
    except OSError as error:
        return {"name": name, "addresses": [], "error": error.strerror or str(error)}


def gloo_choice(environ, name, found):
    """{interface, address, why, state}: as torch and the engine choose. `state`: "named", "host name" or "fallback"."""
    named = [word for word in environ.get("GLOO_SOCKET_IFNAME", "").split(",") if word]
    if named:
        match = next((one for one in found if one["name"] == named[0]), None)
        return {"interface": named[0], "address": (match["addresses"] or [None])[0] if match else None,
                "why": f"GLOO_SOCKET_IFNAME={environ['GLOO_SOCKET_IFNAME']}", "state": "named"}
    for address in name["addresses"]:
        interface = interface_of(address, found)
        if interface:
            return {"interface": interface, "address": address, "why": f"the host name '{name['name']}' resolves to {address}",
                    "state": "host name"}
    why = "the host name doesn't resolve" if not name["addresses"] else "the host name resolves to no address of this host"
    return {"interface": "lo", "address": "127.0.0.1", "why": why, "state": "fallback"}


def interface_of(address, found):
    plain = address.split("%")[0]
    for one in found:
        if plain in one["addresses"]:
            return one["name"]
    loopback = next((one["name"] for one in found if one["kind"] == "loopback"), None)
    return loopback if is_loopback(plain) else None


def nccl_choice(environ, found):
    """{interfaces, why}: sockets for the start, and for the data where there is no InfiniBand."""
    up = [one for one in found if one["up"] and one["addresses"]]
    wish = environ.get("NCCL_SOCKET_IFNAME", "")
    if wish:
        return {"interfaces": [one["name"] for one in up if nccl_matches(wish, one["name"])], "why": f"NCCL_SOCKET_IFNAME={wish}"}
    others = [one["name"] for one in up if one["kind"] != "loopback" and not one["name"].startswith("docker")]
    first = [name for name in others if name.startswith("ib")]
    chosen = first or others or [one["name"] for one in up if one["kind"] != "loopback"] or [one["name"] for one in up]
    return {"interfaces": chosen, "why": "NCCL_SOCKET_IFNAME isn't set: ib* first, then all but docker* and loopback"}


def nccl_matches(wish, name):
    """`^` in front: all but these; `=` in front: exactly these; otherwise names that begin so."""
    head, words = re.fullmatch(r"(\^?=?)(.*)", wish).groups()
    words = [word for word in words.split(",") if word]
    hit = any(name == word if "=" in head else name.startswith(word) for word in words)
    return hit != ("^" in head)


def is_loopback(address):
    try:
        return ipaddress.ip_address(address.split("%")[0]).is_loopback
    except ValueError:
        return False


def best_interface(found):
    """The one to tell people to use: up, with an address that other hosts may reach, real before virtual, fastest first; or None."""
    usable = [one for one in found if one["up"] and one["kind"] != "loopback" and any(map(is_reachable, one["addresses"]))]
    return max(usable, key=lambda one: (not re.match(r"docker|br-|virbr|veth", one["name"]), one["physical"], one["speed_mbit"] or 0),
               default=None)


def is_reachable(address):
    found = ipaddress.ip_address(address.split("%")[0])
    return not (found.is_loopback or found.is_link_local or found.is_unspecified)


def describe(one):
    """'eth0 (10.0.0.1, 10 Gbit/s)'"""
    address = next(filter(is_reachable, one["addresses"]), (one["addresses"] or ["no address"])[0])
    return f"{one['name']} ({address}{', ' + speed_text(one['speed_mbit']) if one['speed_mbit'] else ''})"


def speed_text(mbit):
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit} Mbit/s"
