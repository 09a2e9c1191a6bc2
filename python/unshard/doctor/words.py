"""A diagnosis in words."""
from unshard.doctor.compare import DIFFERENT
from unshard.doctor.diagnose import ranks_text
from unshard.doctor.position import text as line_text

_SHOWN = 16                 # ranks in full; of more, only those that matter


def describe(found):
    """Lines for people: first what is wrong, then what each rank was doing."""
    lines = list(verdict(found))
    lines += [f"not read: {problem}" if "damaged" in problem or "can't be read" in problem else problem for problem in found["problems"]]
    lines += slowness(found)
    if found["ranks"]:
        lines += ["", *rank_lines(found)]
    return "\n".join(lines)


def verdict(found):
    if not found["ranks"]:
        yield "no record can be read" if any("damaged" in one or "can't be read" in one for one in found["problems"]) else "no records"
        return
    difference = found["difference"]
    if difference is not None:
        yield from different(found, difference) if difference["kind"] == DIFFERENT else absent(found, difference)
    for message in found["messages"]:
        yield (f"rank {message['rank']} has been in {message['op']} {message['detail']} of step {message['step']} for "
               f"{message['waited_s']:.1f} s")
    if found["missing"]:
        gone = "is" if len(found["missing"]) == 1 else "are"
        files = ", ".join(f"rank{rank}.json" for rank in found["missing"][:_SHOWN]) + ", ..." * (len(found["missing"]) > _SHOWN)
        yield (f"no record of {ranks_text(found['missing'])} of {found['world_size']} ({files} {gone} missing): killed, stopped, or on "
               "another host whose files aren't here")
    if found["failures"]:
        first, *others = found["failures"]
        yield f"first failure ({first['kind']}): rank {first['rank']}{where(found, first['rank'])}: {first['text']}"
        if others:
            yield f"after it failed: {ranks_text([one['rank'] for one in others])}"
    if found["healthy"]:
        yield "all ranks agree; nothing is stuck"
    elif difference is None and not found["failures"] and not found["messages"]:
        yield "the ranks whose records are here agree"


def different(found, difference):
    yield f"the ranks are in different calls, at collective {difference['index']} of {difference['group']}, step {difference['step']}:"
    kinds = {}
    for call in difference["calls"]:
        kinds.setdefault((call["op"], call["detail"], call["bytes"]), []).append(call)
    for calls in kinds.values():
        yield from caller_lines(found, calls, "is in")
    yield "every rank must make the same calls in the same order, with tensors of the same size"


def absent(found, difference):
    call = difference["calls"][0]
    missing = [one["rank"] for one in difference["absent"] + difference["unknown"]]
    yield (f"{ranks_text(missing)} never came to collective {difference['index']} of {difference['group']}: {call_text(call)}, "
           f"step {difference['step']}")
    for one in difference["absent"]:
        last = f"; its last collective was {call_text(one['last'])} of step {one['last']['step']}" if one["last"] else ""
        yield f"  rank {one['rank']}{where(found, one['rank'])} is elsewhere: {doing(found, one['rank'])}{last}"
    for one in difference["unknown"]:
        why = "hasn't made this group" if one["has_record"] else "left no record"
        yield f"  rank {one['rank']} {why}" + (f"; the others last saw it as: {one['seen_as']}" if one["seen_as"] else "")
    yield from caller_lines(found, difference["calls"], "waits in it")


def caller_lines(found, calls, verb):
    what = f" {call_text(calls[0], with_bytes=True)}" if verb == "is in" else ""
    for call in calls[:_SHOWN]:
        waited = f", for {call['waited_s']:.1f} s" if call["waited_s"] is not None else ", and has left it"
        yield f"  rank {call['rank']}{where(found, call['rank'])} {verb}{what}{waited}{at_line(found, call['rank'])}"
    if len(calls) > _SHOWN:
        yield f"  and so {'are' if len(calls) > _SHOWN + 1 else 'is'} {ranks_text([call['rank'] for call in calls[_SHOWN:]])}"


def call_text(call, with_bytes=False):
    detail = f" '{call['detail']}'" if call["detail"] else ""
    return f"{call['op']}{detail}" + (f" of {call['bytes']} bytes" if with_bytes and call["bytes"] else "")


def state(found, rank):
    return next((one for one in found["ranks"] if one["rank"] == rank), None)


def where(found, rank):
    one = state(found, rank)
    return f" (host {one['host']}, pid {one['pid']})" if one else ""


def at_line(found, rank):
    one = state(found, rank)
    return f", at {line_text(one['line'])}" if one and one["line"] else ""


def doing(found, rank):
    one = state(found, rank)
    if one is None:
        return "not known"
    parts = []
    if one["phase"]:
        detail = f" at '{one['phase']['detail']}'" if one["phase"].get("detail") else ""
        parts.append(f"{one['phase']['name']}{detail} of step {one['step']}")
    if one["waiting"]:
        parts.append(f"waiting in {one['waiting']['where']} for {one['waiting']['for_s']:.1f} s")
    if one["line"]:
        parts.append(f"at {line_text(one['line'])}")
    return ", ".join(parts) or "not known"


def slowness(found):
    for one in found["stragglers"]:
        yield (f"straggler: rank {one['rank']}{where(found, one['rank'])} comes {one['late_s'] * 1e3:.1f} ms after the first to "
               f"{one['call']}, which comes every {one['period_s'] * 1e3:.1f} ms (median of {one['calls']})")
    for one in found["slow_links"]:
        what = f"from host {one['source']} to host {one['target']}" if one["source"] else f"of host {one['target']}"
        yield f"slow link: {what}, {rate(one['bytes_per_s'])}; the others do {rate(one['others_bytes_per_s'])}" + loss(one)
    for one in found["lossy_links"]:
        yield f"lossy link: from host {one['source']} to host {one['target']}" + loss(one)
    for one in found["far_links"]:
        yield f"far link: from host {one['source']} to host {one['target']}, {one['round_trip_s'] * 1e3:.1f} ms there and back"


def rate(bytes_per_s):
    return f"{bytes_per_s * 8e-9:.2f} Gbit/s" if bytes_per_s >= 1.25e8 else f"{bytes_per_s * 8e-6:.1f} Mbit/s"


def loss(one):
    return f", {one['lost_share']:.1%} of its packets are sent again" if one["lost_share"] >= 0.001 else ""


def rank_lines(found):
    shown = found["ranks"] if len(found["ranks"]) <= _SHOWN else [one for one in found["ranks"] if matters(found, one["rank"])][:_SHOWN]
    for one in shown:
        asked = "" if one["reason"] == "asked" else f", {one['reason']}"
        ago = max(0, found["now"] - one["written"])
        yield f"rank {one['rank']} on host {one['host']}, pid {one['pid']} (seen {ago:.0f} s ago{asked}): {doing(found, one['rank'])}"
    if len(shown) < len(found["ranks"]):
        yield f"({len(found['ranks']) - len(shown)} more ranks; --json has them all)"


def matters(found, rank):
    difference = found["difference"]
    named = {one["rank"] for one in found["failures"] + found["stragglers"]}
    if difference:
        named |= {one["rank"] for one in difference["absent"]} | {call["rank"] for call in difference["calls"][:2]}
    return rank in named
