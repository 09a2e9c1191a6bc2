"""Reading what ranks wrote."""
import contextlib
import json
import pathlib
import re
from dataclasses import dataclass, field

from unshard.timeline.clock import Clock

_NAME = re.compile(r"timeline\.rank(\d+)(?:\.([\w-]+))?\.json", re.ASCII)


_MOST_RANKS = 1 << 20


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


def read_ranks(paths, left_out=None):
    """Rank objects in rank order, of the newest run among the files; times are corrected and start at 0.

    `left_out`: a list that gets a line for each file that can't be read; without one, or where none can be, that is a TimelineError.
    """
    problems = []
    loaded = [item for path in paths if (item := _tried(_load, problems, path)) is not None]
    if not loaded:
        raise TimelineError("; ".join(problems))
    newest = max((rank for _, rank, _ in loaded), key=lambda rank: rank.origin_unix_ms).run
    loaded = sorted((item for item in loaded if item[1].run == newest), key=lambda item: item[1].rank)
    first = min(rank.clock.corrected(rank.origin_ns) for _, rank, _ in loaded)
    ranks = [rank for path, rank, events in loaded if _tried(_fill, problems, path, rank, events, first)]
    if problems and (left_out is None or not ranks):
        raise TimelineError("; ".join(problems))
    if problems:
        left_out.extend(problems)
    return ranks


def _tried(what, problems, *arguments):
    """What it returns; None, and a line in `problems`, where a file is damaged."""
    try:
        return what(*arguments)
    except TimelineError as error:
        problems.append(str(error))
        return None


@contextlib.contextmanager
def _blamed_on(path):
    try:
        yield
    except KeyError as error:
        raise TimelineError(f"{path}: damaged, or not a timeline of this version ({error} is missing)") from error
    except (IndexError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise TimelineError(f"{path}: damaged, or not a timeline of this version ({error})") from error


def _load(path):
    """(path, Rank, events)"""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise TimelineError(f"{path} can't be read: {error.strerror}") from error
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        document = _whole_lines(text)
        if document is None:
            line = getattr(error, "lineno", 1)
            raise TimelineError(f"{path}: line {line} isn't JSON, and nothing before it can be used") from error
    if not isinstance(document, dict) or not {"otherData", "traceEvents", "recording"} <= document.keys():
        raise TimelineError(f"{path}: not a timeline that Unshard wrote")
    with _blamed_on(path):
        return path, _rank(document), document["traceEvents"]


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
    except (ValueError, RecursionError):
        return None


def _rank(document):
    facts, recording = document["otherData"], document["recording"]
    for name in ("otherData", "recording"):
        if not isinstance(document[name], dict):
            raise ValueError(f"'{name}' is no table")
    if not (0 <= int(facts["rank"]) < _MOST_RANKS and 0 < int(facts["world_size"]) <= _MOST_RANKS):
        raise ValueError(f"rank {facts['rank']} of {facts['world_size']}")
    readings = [tuple(map(int, event["args"]["reading"])) for event in document["traceEvents"]
                if event["ph"] == "M" and event["name"] == "clock"]
    return Rank(int(facts["rank"]), str(facts["host"]), str(facts["run"]), int(facts["world_size"]), int(facts["main_thread"]),
                int(recording["dropped"]), Clock(readings), int(facts["origin_ns"]), int(facts["origin_unix_ms"]),
                bool(recording["closed"]), {int(facts["main_thread"]): "main"})


def _fill(path, rank, events, first_ns):
    with _blamed_on(path):
        _add_events(rank, events, first_ns)
        return True


def _add_events(rank, events, first_ns):
    def when(microseconds):
        return (rank.clock.corrected(rank.origin_ns + microseconds * 1e3) - first_ns) / 1e3
    for event in events:
        arguments = event.get("args", {})
        if event["ph"] == "X":
            size, step = arguments.get("bytes"), arguments.get("step")
            rank.spans.append(Span(str(event["cat"]), str(event["name"]), str(arguments.get("of", "")), None if size is None else int(size),
                                   int(event["tid"]), when(event["ts"]), when(event["ts"] + event["dur"]),
                                   int(step) if step is not None or event["cat"] == "step" else None))
        elif event["ph"] == "C":
            rank.counters.setdefault(str(event["name"]), []).append((when(event["ts"]), int(arguments["bytes"])))
        elif event["name"] == "thread_name":
            rank.thread_names[int(event["tid"])] = str(arguments["name"])
    rank.spans.sort(key=lambda s: (s.begin, -s.end))
    for points in rank.counters.values():
        points.sort()
