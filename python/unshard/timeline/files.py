"""Reading what ranks wrote."""
import contextlib
import json
import pathlib
import re
from dataclasses import dataclass, field

from unshard.timeline.clock import Clock

_NAME = re.compile(r"timeline\.rank(\d+)(?:\.([\w-]+))?\.json", re.ASCII)


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
    origin_unix_ms: int
    closed: bool = True          # False: killed, still running, or its disk was full; what it wrote until then is here
    thread_names: dict = field(default_factory=dict)
    spans: list = field(default_factory=list)
    counters: dict = field(default_factory=dict)       # name -> [(microseconds, bytes)]


def engines_of(folder):
    """{engine's name: [files]} in `folder`; the first engine of a process has the name ""."""
    found = {}
    for path in sorted(pathlib.Path(folder).glob("timeline.rank*.json")):
        match = _NAME.fullmatch(path.name)
        if match and path.is_file():
            found.setdefault(match[2] or "", []).append(path)
    return found


def read_ranks(paths):
    """Rank objects in rank order, of the newest run among the files; times are corrected and start at 0."""
    loaded = [(path, *_load(path)) for path in paths]
    newest = max((rank for _, rank, _ in loaded), key=lambda rank: rank.origin_unix_ms).run
    loaded = sorted((item for item in loaded if item[1].run == newest), key=lambda item: item[1].rank)
    first = min((rank.clock.corrected(rank.origin_ns) for _, rank, _ in loaded), default=0)
    for path, rank, events in loaded:
        with _blamed_on(path):
            _add_events(rank, events, first)
    return [rank for _, rank, _ in loaded]


@contextlib.contextmanager
def _blamed_on(path):
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise TimelineError(f"{path}: damaged, or not a timeline of this version ({type(error).__name__}: {error}). Remove it to see the "
                            "others") from error


def _load(path):
    """(Rank, events)"""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        document = _whole_lines(text)
        if document is None:
            raise TimelineError(f"{path}: line {error.lineno} isn't JSON, and nothing before it can be used. Remove the "
                                "file to see the others") from error
    if not isinstance(document, dict) or not {"otherData", "traceEvents", "recording"} <= document.keys():
        raise TimelineError(f"{path}: not a timeline that Unshard wrote")
    with _blamed_on(path):
        return _rank(document), document["traceEvents"]


def _whole_lines(text):
    """What can be read of a file that a killed process left: whose it is, then the events up to the first line that isn't whole. None:
    nothing."""
    lines = text.split("\n")
    head = _json_line(lines[0], "}")
    if not isinstance(head, dict) or len(lines) < 2 or lines[1] != '"traceEvents": [':
        return None
    events = []
    for line in lines[2:]:
        event = _json_line(line)
        if event is None:
            break
        events.append(event)
    return {**head, "traceEvents": events, "recording": {"dropped": 0, "closed": False}}


def _json_line(line, end=""):
    """What is in a line, which may end with a comma. None: it isn't whole."""
    try:
        return json.loads(line.rstrip(",") + end)
    except json.JSONDecodeError:
        return None


def _rank(document):
    facts, recording = document["otherData"], document["recording"]
    readings = [tuple(map(int, event["args"]["reading"])) for event in document["traceEvents"]
                if event["ph"] == "M" and event["name"] == "clock"]
    return Rank(int(facts["rank"]), str(facts["host"]), str(facts["run"]), int(facts["world_size"]), int(facts["main_thread"]),
                int(recording["dropped"]), Clock(readings), int(facts["origin_ns"]), int(facts["origin_unix_ms"]),
                bool(recording["closed"]), {int(facts["main_thread"]): "main"})


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
