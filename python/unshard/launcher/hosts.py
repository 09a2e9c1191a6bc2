"""Hostfiles and the NODE[:SLOT,...] filters."""
import os
import re
import socket

from unshard.launcher.errors import LaunchError

_LINE = re.compile(r"(\S+)\s+slots\s*=\s*(\d+)")
_HOST = re.compile(r"[A-Za-z0-9_][\w.:@-]*", re.ASCII)       # so that no program that is given a name can take it for an option


def read_hostfile(path):
    """{host: number of slots} in file order; None where there is no such file."""
    if not os.path.isfile(path):
        return None
    hosts = {}
    with open(path, encoding="utf-8") as lines:
        for number, raw in enumerate(lines, 1):
            line = raw.split("#", 1)[0].strip()
            if not line:
                continue
            match = _LINE.fullmatch(line)
            if not match:
                raise LaunchError(f"{path}:{number}: '{line}' is not of the form 'name slots=N'")
            host, slots = match.group(1), int(match.group(2))
            if not _HOST.fullmatch(host):
                raise LaunchError(f"{path}:{number}: '{host}' can't be a host's name: letters, digits and _.:@- only, and no - in front")
            if host in hosts:
                raise LaunchError(f"{path}:{number}: host '{host}' is listed twice; give it one line with all its slots")
            if slots < 1:
                raise LaunchError(f"{path}:{number}: host '{host}' has no slots; leave the line out or give it at least 1")
            hosts[host] = slots
    if not hosts:
        raise LaunchError(f"{path}: names no host; each line is 'name slots=N'")
    return hosts


def parse_filter(text, flag):
    """{host: [slot, ...]}, an empty list meaning all slots of the host."""
    chosen = {}
    for part in text.split("@"):
        host, colon, slots = part.strip().partition(":")
        if not host or (colon and not re.fullmatch(r"\d+(,\d+)*", slots)):
            raise LaunchError(f"{flag}: '{part}' is not of the form NODE or NODE:SLOT,SLOT,...")
        numbers = [int(slot) for slot in slots.split(",")] if colon else []
        if host in chosen or len(set(numbers)) != len(numbers):
            raise LaunchError(f"{flag}: '{part}' names a host or a slot a second time")
        chosen[host] = numbers
    return chosen


def select(pool, include="", exclude=""):
    """The slots of `pool` ({host: [slot, ...]}) that the filters leave, in the pool's order."""
    flag = "--include" if include else "--exclude"
    chosen = parse_filter(include or exclude, flag)
    for host, slots in chosen.items():
        if host not in pool:
            raise LaunchError(f"{flag}: there is no host '{host}' here; there is {', '.join(pool)}")
        unknown = [slot for slot in slots if slot not in pool[host]]
        if unknown:
            raise LaunchError(f"{flag}: '{host}' has no slot {unknown[0]}; it has {', '.join(map(str, pool[host]))}")
    if include:
        left = {host: [s for s in slots if not chosen[host] or s in chosen[host]] for host, slots in pool.items() if host in chosen}
    else:
        left = {host: [s for s in slots if host not in chosen or (chosen[host] and s not in chosen[host])] for host, slots in pool.items()}
    left = {host: slots for host, slots in left.items() if slots}
    if not left:
        raise LaunchError(f"{flag}={include or exclude} leaves no slot to run on")
    return left


def is_local(host):
    """Is this name this machine? Decided by name, with no look-up in the network."""
    own = socket.gethostname()
    return host in {"localhost", "127.0.0.1", "::1", own, own.split(".", 1)[0]}
