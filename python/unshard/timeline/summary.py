"""Where each step's time went, per rank, and what to say of it in words."""
import bisect
from dataclasses import dataclass

KINDS = ("compute", "gather", "reduce", "update", "other")
# Of spans that overlap the first in this order has the time: a wait inside of forward isn't computing.
_PRIORITY = ("gather", "reduce", "update", "compute")
_KIND_OF_LANE = {"gather": "gather", "reduce": "reduce", "bucket": "reduce", "update": "update", "compute": "compute"}
_FOREGROUND = {"step", "compute", "gather", "reduce", "update"}


@dataclass
class Step:
    """One step of one rank: microseconds by kind, which add up to its duration."""
    step: int
    begin: float
    end: float
    kinds: dict
    wait: object = None            # the longest Span that somebody waited in


def foreground_threads(rank):
    """Those that compute or wait; what others do goes on beside the step and costs it nothing."""
    background = {"prefetch", "reduction", "communication"}
    return {s.thread for s in rank.spans if s.lane in _FOREGROUND and rank.thread_names.get(s.thread) not in background}


def steps_of(rank):
    threads = foreground_threads(rank)
    spans = [s for s in rank.spans if s.thread in threads and s.lane in _KIND_OF_LANE]
    longest = max((s.end - s.begin for s in spans), default=0)
    begins = [s.begin for s in spans]
    result = []
    for mark in (s for s in rank.spans if s.lane == "step"):
        near = spans[bisect.bisect_left(begins, mark.begin - longest):bisect.bisect_left(begins, mark.end)]
        inside = [s for s in near if s.end > mark.begin]
        waits = [s for s in inside if s.lane in ("gather", "reduce") and s.begin >= mark.begin]
        result.append(Step(mark.step, mark.begin, mark.end, _shares(mark, inside), max(waits, key=lambda s: s.end - s.begin, default=None)))
    return result


def _shares(mark, spans):
    """Microseconds of [mark.begin, mark.end) by kind."""
    edges = []
    for span in spans:
        kind = _KIND_OF_LANE[span.lane]
        edges += [(max(span.begin, mark.begin), 1, kind), (min(span.end, mark.end), -1, kind)]
    edges.sort(key=lambda e: e[0])
    shares, running, at = dict.fromkeys(KINDS, 0.0), dict.fromkeys(_PRIORITY, 0), mark.begin
    for time, change, kind in [*edges, (mark.end, 0, "compute")]:
        current = next((k for k in _PRIORITY if running[k] > 0), "other")
        shares[current] += time - at
        running[kind] += change
        at = time
    return shares


def steady(steps):
    """Without the first, which warms up, where there are enough others."""
    return steps[1:] if len(steps) > 2 else steps


def averages(steps):
    """Milliseconds a step by kind, and "step" for the whole."""
    used = steady(steps)
    if not used:
        return dict.fromkeys((*KINDS, "step"), 0.0)
    result = {kind: sum(s.kinds[kind] for s in used) / len(used) / 1e3 for kind in KINDS}
    result["step"] = sum(s.end - s.begin for s in used) / len(used) / 1e3
    return result


def bytes_text(count):
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def words(ranks, steps):
    """Sentences: (heading, text). `steps`: Step lists by rank number."""
    means = {r.rank: averages(steps[r.rank]) for r in ranks if steps[r.rank]}
    if not means:
        return [("No step was recorded", "the run ended before its first step()")]
    said = [_slowest(ranks, means), _split(means)]
    wait = _longest_wait(ranks, steps)
    if wait:
        said.append(wait)
    return said


def _own(mean):
    return mean["step"] - mean["gather"] - mean["reduce"]


def _slowest(ranks, means):
    hosts = {r.rank: r.host for r in ranks}
    slow = max(means, key=lambda r: _own(means[r]))
    fast = min(means, key=lambda r: _own(means[r]))
    text = f"{_own(means[slow]):.1f} ms of its own work a step"
    if len(means) > 1:
        more = _own(means[slow]) - _own(means[fast])
        text += f", {more:.1f} ms more than rank {fast}, the fastest"
        if more < 0.03 * means[slow]["step"]:
            text += ": no straggler"
    return f"Slowest: rank {slow} ({hosts[slow]})" if len(means) > 1 else f"Rank {slow} ({hosts[slow]})", text


def _split(means):
    whole = sum(m["step"] for m in means.values()) or 1
    share = {kind: sum(m[kind] for m in means.values()) / whole for kind in KINDS}
    names = {"compute": "computing", "gather": "waiting for gathers", "reduce": "reduction and waiting for it", "update": "update",
             "other": "outside the engine"}
    text = ", ".join(f"{100 * share[kind]:.1f} % {names[kind]}" for kind in KINDS)
    return f"A step takes {max(m['step'] for m in means.values()):.1f} ms", text


def _longest_wait(ranks, steps):
    found = [(s.wait.end - s.wait.begin, r, s) for r in ranks for s in steady(steps[r.rank]) if s.wait]
    if not found or all(r.world_size == 1 for r in ranks):        # a rank alone waits for nobody
        return None
    duration, rank, step = max(found, key=lambda f: f[0])
    wait = step.wait
    what = f"for {wait.of}" if wait.of else f"“{wait.name}”"
    if wait.bytes and wait.bytes > 0:
        what += f" ({bytes_text(wait.bytes)})"
    return "Longest wait", f"{duration / 1e3:.1f} ms on rank {rank.rank} in step {step.step}: {what}, {_place(wait)}"


def _place(wait):
    if wait.lane == "gather":
        return "a gather that nothing hid"
    return "until the other ranks came to step()" if wait.name.startswith("meet") else "for gradients of the other ranks"
