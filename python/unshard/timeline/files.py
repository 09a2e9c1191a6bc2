"""Reading what ranks wrote."""
import json
import pathlib
import re
from dataclasses import dataclass, field

from unshard.timeline.clock import Clock

_NAME = re.compile(r"rank(\d+)(?:\.([\w-]+))?\.json$")


class TimelineError(Exception):
    """A folder that can't be merged: says what is wrong with which file."""


@dataclass
class Span:
    """Times in microseconds of rank 0's clock, from the start of the run."""
    lane: str
    name: str
    of: str               # a parameter, a bucket: what it was about
    bytes: int | None
    thread: int
    begin: float
    end: float
    step: int | None = None


@dataclass
class Rank:
    """One rank's recording."""
    rank: int
    host: str
    run: str
    world_size: int
    main_thread: int
    dropped: int
    clock: Clock
    origin_ns: int
    thread_names: dict = field(default_factory=dict)
    spans: list = field(default_factory=list)
    counters: dict = field(default_factory=dict)       # name -> [(microseconds, bytes)]


def engines_of(folder):
    """{engine's name: [files]} in `folder`; the first engine of a process has the name ""."""
    found = {}
    for path in sorted(pathlib.Path(folder).glob("rank*.json")):
        match = _NAME.fullmatch(path.name)
        if match:
            found.setdefault(match[2] or "", []).append(path)
    return found


def read_ranks(paths):
    """Rank objects in rank order, of the newest run among the files; times are corrected and start at 0."""
    documents = [_load(path) for path in paths]
    newest = max(documents, key=lambda d: d["otherData"]["origin_unix_ms"])["otherData"]["run"]
    documents = sorted((d for d in documents if d["otherData"]["run"] == newest), key=lambda d: d["otherData"]["rank"])
    ranks = [_rank(document["otherData"]) for document in documents]
    first = min((r.clock.corrected(r.origin_ns) for r in ranks), default=0)
    for rank, document in zip(ranks, documents, strict=True):
        _add_events(rank, document["traceEvents"], first)
    return ranks


def _load(path):
    try:
        return _checked(path, json.loads(path.read_text(errors="replace")))
    except json.JSONDecodeError as error:
        raise TimelineError(f"{path}: line {error.lineno} isn't JSON; a rank that is killed while it writes leaves such a file. "
                            "Remove it to see the others") from error


def _checked(path, document):
    if not isinstance(document, dict) or "run" not in document.get("otherData", {}) or "traceEvents" not in document:
        raise TimelineError(f"{path}: not a timeline that Unshard wrote")
    return document


def _rank(facts):
    return Rank(facts["rank"], facts["host"], facts["run"], facts["world_size"], facts["main_thread"], facts["dropped"],
                Clock(facts["clock"]), facts["origin_ns"])


def _add_events(rank, events, first_ns):
    def when(microseconds):
        return (rank.clock.corrected(rank.origin_ns + microseconds * 1e3) - first_ns) / 1e3
    for event in events:
        arguments = event.get("args", {})
        if event["ph"] == "X":
            rank.spans.append(Span(event["cat"], event["name"], arguments.get("of", ""), arguments.get("bytes"), event["tid"],
                                   when(event["ts"]), when(event["ts"] + event["dur"]), arguments.get("step")))
        elif event["ph"] == "C":
            rank.counters.setdefault(event["name"], []).append((when(event["ts"]), arguments["bytes"]))
        elif event["name"] == "thread_name":
            rank.thread_names[event["tid"]] = arguments["name"]
    rank.spans.sort(key=lambda s: (s.begin, -s.end))
    for points in rank.counters.values():
        points.sort()
