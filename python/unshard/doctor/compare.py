"""The first point where ranks differ. Collectives of a group are numbered alike on every rank, so that the same number must be the same
call; a number that some have begun and others haven't is where those are waited for."""
import dataclasses

# Operations whose bytes are equal on every rank; of the others only one rank's count, or each brings what it likes.
_EQUAL_BYTES = ("all_gather", "reduce_scatter", "reduce_scatter_by_host", "all_reduce", "all_to_all", "exchange")

DIFFERENT, ABSENT = "different", "absent"


@dataclasses.dataclass
class Difference:
    kind: str                # DIFFERENT: calls that don't match; ABSENT: some ranks haven't come
    group: str
    index: int
    members: list
    calls: dict              # rank -> its entry with that index
    absent: list             # ranks with a record that haven't begun it
    unknown: list            # members without a record
    when: float              # unix seconds, when the first rank began it
    waited_s: float          # of the rank that has waited longest, when it wrote its record


def unix_time(record, monotonic):
    return record["written"] - (record["monotonic"] - monotonic)


def calls_of(group):
    return {entry["index"]: entry for entry in group["entries"] if entry["index"] >= 0}


def group_names(records):
    """In the order of their first appearance."""
    return list(dict.fromkeys(group["name"] for record in records.values() for group in record["groups"]))


def groups_named(records, name):
    """{rank: its group of that name}"""
    return {rank: group for rank, record in records.items() for group in record["groups"] if group["name"] == name}


def first_difference(records):
    """The earliest over all groups, or None. `records`: {rank: record}."""
    found = [difference for name in group_names(records) if (difference := difference_in(records, name)) is not None]
    certain = [d for d in found if d.kind == DIFFERENT]
    return min(certain or found, key=lambda difference: difference.when, default=None)


def difference_in(records, name):
    groups = groups_named(records, name)
    calls = {rank: calls_of(group) for rank, group in groups.items()}
    members = sorted({rank for group in groups.values() for rank in group["ranks"]})
    known = {rank: table for rank, table in calls.items() if table}
    if not known:
        return None
    low = max(min(table) for table in known.values())       # older ones have left somebody's ring
    for index in sorted({index for table in known.values() for index in table if index >= low}):
        begun = {rank: table[index] for rank, table in known.items() if index in table}
        absent = [rank for rank in calls if rank not in begun]
        kind = DIFFERENT if not alike(list(begun.values())) else ABSENT
        waiting = {rank: entry for rank, entry in begun.items() if entry["end"] is None}
        unknown = [rank for rank in members if rank not in calls]
        # One that has ended had everybody: the record of whoever seems absent is merely older.
        if kind == ABSENT and (not (absent or unknown) or not waiting or len(waiting) < len(begun)):
            continue
        waited = max((records[rank]["monotonic"] - entry["start"] for rank, entry in waiting.items()), default=0.0)
        when = min(unix_time(records[rank], entry["start"]) for rank, entry in begun.items())
        if kind == ABSENT and not unknown and all(failed_before(records[rank], when) for rank in absent):
            continue                                         # they didn't come because they had failed elsewhere
        return Difference(kind, name, index, members, begun, absent, unknown, when, waited)
    return None


def failed_before(record, when):
    return bool(record.get("failure")) and record["failure"].get("at", when) < when


def alike(entries):
    first = entries[0]
    return all((e["op"], e["detail"]) == (first["op"], first["detail"])
               and (e["bytes"] == first["bytes"] or e["op"] not in _EQUAL_BYTES) for e in entries)


def last_call(record, name):
    """The newest collective of a group that a rank has begun, or None."""
    calls = {}
    for group in record["groups"]:
        if group["name"] == name:
            calls = calls_of(group)
    return calls[max(calls)] if calls else None


def pending_messages(records):
    """[(rank, entry)] of sends and receives that are still going on."""
    return [(rank, entry) for rank, record in sorted(records.items()) for group in record["groups"] for entry in group["entries"]
            if entry["index"] < 0 and entry["end"] is None and entry["op"] in ("send", "recv")]
