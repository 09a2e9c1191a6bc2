"""From records to a diagnosis: a dict that JSON can hold, with everything that words.py says."""
import dataclasses
import statistics
import time

from unshard.doctor import links, position, stragglers
from unshard.doctor.compare import DIFFERENT, calls_of, first_difference, groups_named, last_call, pending_messages

_LEAST_WAIT_S = 1.0
_USUAL_GAPS = 5             # a wait of so many usual times between two collectives isn't a rank's being a little behind


def diagnose(records, now=None):
    """`records`: load.Records."""
    by_rank = records.by_rank
    difference = first_difference(by_rank) if by_rank else None
    failures = failures_of(by_rank)
    stuck = difference is not None and (difference.kind == DIFFERENT or bool(failures) or is_long(by_rank, difference))
    messages = [] if stuck else long_messages(by_rank)
    known = links.links(by_rank)
    found = {
        "world_size": records.world,
        "written": max((record["written"] for record in by_rank.values()), default=None),
        "now": time.time() if now is None else now,
        "ranks": [state_of(record, links.host_names(by_rank)[rank]) for rank, record in sorted(by_rank.items())],
        "missing": records.missing,
        "problems": records.problems + disagreeing_versions(by_rank),
        "failures": failures,
        "difference": in_full(by_rank, difference) if stuck else None,
        "messages": messages,
        "stragglers": [dataclasses.asdict(one) for one in stragglers.stragglers(by_rank)],
        "slow_links": [dataclasses.asdict(one) for one in links.slow_links(known)],
        "lossy_links": [dataclasses.asdict(one) for one in links.lossy_links(known)],
        "far_links": [dataclasses.asdict(one) for one in links.far_links(known)],
    }
    found["healthy"] = bool(by_rank) and not (stuck or failures or messages or found["missing"] or found["problems"])
    return found


def failures_of(by_rank):
    """The first one first: the others follow from it."""
    failed = [{**record["failure"], "rank": rank} for rank, record in by_rank.items() if record["failure"]]
    raised = [{"rank": rank, "kind": "exception", "text": record["text"], "at": record["written"]} for rank, record in by_rank.items()
              if record["reason"] == "exception" and not record["failure"]]
    return sorted(failed + raised, key=lambda one: one.get("at", 0))


def is_long(by_rank, difference):
    gaps = []
    for rank, group in groups_named(by_rank, difference.group).items():
        starts = [entry["start"] for _, entry in sorted(calls_of(group).items()) if entry["end"] is not None]
        gaps += [b - a for a, b in zip(starts, starts[1:], strict=False)] if rank in difference.calls else []
    usual = statistics.quantiles(gaps, n=10)[-1] if len(gaps) > 1 else 0.0
    return difference.waited_s >= max(_LEAST_WAIT_S, _USUAL_GAPS * usual)


def long_messages(by_rank):
    waits = [{"rank": rank, "op": entry["op"], "detail": entry["detail"], "waited_s": by_rank[rank]["monotonic"] - entry["start"],
              "step": entry["step"]} for rank, entry in pending_messages(by_rank)]
    return [wait for wait in waits if wait["waited_s"] >= _LEAST_WAIT_S]


def state_of(record, host):
    group = newest_group(record)
    state = {"rank": record["rank"], "host": host, "pid": record["pid"], "reason": record["reason"], "text": record["text"],
             "written": record["written"], "step": group["step"] if group else None, "phase": group and group["phase"],
             "waiting": longest_wait(record), "line": position.users_line(record)}
    return state


def newest_group(record):
    """The group that has most to say: open, and with the most collectives."""
    return max(record["groups"], key=lambda group: (not group["closed"], len(group["entries"])), default=None)


def longest_wait(record):
    waits = [group["waiting"] for group in record["groups"] if group["waiting"] and not group["closed"]]
    return max(waits, key=lambda wait: wait.get("for_s", 0), default=None)


def in_full(by_rank, difference):
    detail = dataclasses.asdict(difference)
    detail["step"] = next(iter(difference.calls.values()))["step"]
    detail["calls"] = [{"rank": rank, **entry, "waited_s": waited(by_rank[rank], entry)}
                       for rank, entry in sorted(difference.calls.items())]
    detail["absent"] = [{"rank": rank, "last": last_call(by_rank[rank], difference.group)} for rank in difference.absent]
    detail["unknown"] = [{"rank": rank, "has_record": rank in by_rank, "seen_as": seen_as(by_rank, rank)} for rank in difference.unknown]
    return detail


def waited(record, entry):
    """Seconds that a rank has been in a call; None: it has left it."""
    return record["monotonic"] - entry["start"] if entry["end"] is None else None


def seen_as(by_rank, missing):
    """What the others' shared memory said of a rank, newest record first: "idle, step 3 (12.0 s)"."""
    mark = f"rank {missing}: "
    for record in sorted(by_rank.values(), key=lambda record: -record["written"]):
        for group in record["groups"]:
            for part in str(group["peers"]).split("; "):
                if part.startswith(mark):
                    return part[len(mark):]
    return ""


def disagreeing_versions(by_rank):
    lines = []
    for name in sorted({name for record in by_rank.values() for name in record["versions"]}):
        versions = {}
        for rank, record in sorted(by_rank.items()):
            versions.setdefault(record["versions"].get(name, "none"), []).append(rank)
        if len(versions) > 1:
            lines.append(f"{name} differs: " + ", ".join(f"{version} on {ranks_text(ranks)}" for version, ranks in versions.items()))
    return lines


def ranks_text(ranks):
    """"rank 3", "ranks 0-2, 5"."""
    parts, ranks = [], sorted(ranks)
    for rank in ranks:
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return f"rank{'s' * (len(ranks) > 1)} " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
