"""Links between hosts that are slower than the others, from what each rank's kernel measured on its connections."""
import dataclasses
import statistics

_ENOUGH_BYTES = 1 << 20
_SLOW = 0.5                  # of what the other links do
_FAR = 3.0                   # times the others' round trip
_LOSSY = 0.01                # of the segments
_SEGMENT = 1448


@dataclasses.dataclass
class Link:
    source: str              # host names
    target: str
    bytes_per_s: float       # 0: not known
    round_trip_s: float
    bytes_sent: int
    lost_share: float        # retransmitted segments of all sent


@dataclasses.dataclass
class SlowLink:
    source: str              # "" with target: everything of that host
    target: str
    bytes_per_s: float
    others_bytes_per_s: float
    lost_share: float


def host_names(records):
    """{rank: name}. Machines that call themselves alike are told apart by their addresses."""
    places = {rank: (record["host"], tuple(sorted(record["addresses"]))) for rank, record in records.items()}
    by_name = {}
    for name, addresses in places.values():
        by_name.setdefault(name, set()).add(addresses)
    return {rank: name if len(by_name[name]) == 1 or not addresses else f"{name} ({addresses[0]})"
            for rank, (name, addresses) in places.items()}


def links(records):
    """All links between hosts that are known, fastest connection first counted."""
    names = host_names(records)
    owners = {}
    for rank, record in records.items():
        for address in record["addresses"]:
            owners.setdefault(address, set()).add(names[rank])
    found = {}
    for rank, record in records.items():
        for link in record["links"]:
            target = owners.get(link.get("peer"), set())
            if len(target) == 1 and names[rank] not in target:     # an address that two hosts have (a bridge's) says nothing
                found.setdefault((names[rank], next(iter(target))), []).append(link)
    return [merge(source, target, parts) for (source, target), parts in sorted(found.items())]


def merge(source, target, parts):
    sent = sum(part.get("bytes_sent", 0) for part in parts)
    trips = [part["round_trip_s"] for part in parts if part.get("round_trip_s", 0) > 0]
    lost = sum(part.get("retransmitted_segments", 0) for part in parts) / max(1, sent / _SEGMENT)
    return Link(source, target, max((part.get("send_bytes_per_s", 0) for part in parts), default=0), min(trips, default=0), sent,
                min(lost, 1.0))


def slow_links(found):
    """Those markedly slower than the rest; a host of which all links are slow is named once."""
    rated = [link for link in found if link.bytes_per_s > 0 and link.bytes_sent >= _ENOUGH_BYTES]
    slow = []
    for link in rated:
        others = [other.bytes_per_s for other in rated if other is not link]
        if others and link.bytes_per_s < _SLOW * statistics.median_high(others):
            slow.append(SlowLink(link.source, link.target, link.bytes_per_s, statistics.median_high(others), link.lost_share))
    return by_host(rated, slow)


def by_host(rated, slow):
    pairs = {(one.source, one.target): one for one in slow}
    for host in sorted({name for pair in pairs for name in pair}):
        touching = [(link.source, link.target) for link in rated if host in (link.source, link.target)]
        if len(touching) < 3 or len(touching) == len(rated) or not all(pair in pairs for pair in touching):
            continue
        its = [pairs.pop(pair) for pair in touching]
        pairs[("", host)] = SlowLink("", host, max(one.bytes_per_s for one in its), its[0].others_bytes_per_s,
                                     max(one.lost_share for one in its))
    return list(pairs.values())


def lossy_links(found):
    return [link for link in found if link.bytes_sent >= _ENOUGH_BYTES and link.lost_share >= _LOSSY]


def far_links(found):
    trips = [link.round_trip_s for link in found if link.round_trip_s > 0]
    return [link for link in found if len(trips) > 2 and link.round_trip_s > max(0.001, _FAR * statistics.median(trips))]
