"""One self-contained page about a run: data, style and script are inside, nothing is fetched."""
import bisect
import html
import json
import pathlib

from unshard.timeline.merge import missing_ranks
from unshard.timeline.summary import KINDS, averages, bytes_text, foreground_threads, steady, steps_of, words

_FILES = pathlib.Path(__file__).parent / "assets"
_SCRIPTS = ("text.js", "summary.js", "tracks.js", "memory.js", "main.js")
# Spans that a page holds at most: a browser draws that many smoothly. The trace holds all.
MOST_SPANS = 120_000
_POINTS = 3000                    # of one memory curve
_COMPUTE_LANES = {"compute", "update", "other"}


def page(ranks, engine="", left_out=()):
    steps = {r.rank: steps_of(r) for r in ranks}
    shown = _shown_steps(ranks, steps)
    texts = _Texts()
    data = {"ranks": [_rank(r, steps[r.rank], shown, texts, MOST_SPANS // len(ranks)) for r in ranks], "kinds": KINDS,
            "steps": sorted({s.step for own in steps.values() for s in own}), "texts": texts.list,
            "shown": None if shown is None else sorted(shown)}
    lines = "".join(f"<p><b>{html.escape(head)}:</b> {html.escape(text)}</p>" for head, text in words(ranks, steps))
    result = (_FILES / "page.html").read_text(encoding="utf-8")
    for name, text in (("TITLE", html.escape(_title(ranks, engine))), ("WORDS", lines),
                       ("NOTES", _notes(ranks, shown, data["steps"], left_out)), ("STYLE", _asset("page.css")),
                       ("SCRIPT", "\n".join(_asset(name) for name in _SCRIPTS)),
                       ("DATA", json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))):
        result = result.replace(f"@@{name}@@", text)
    return result


def _asset(name):
    return (_FILES / name).read_text(encoding="utf-8")


def _title(ranks, engine):
    hosts = {r.host for r in ranks}
    return (f"Unshard timeline: {len(ranks)} {'rank' if len(ranks) == 1 else 'ranks'} on {len(hosts)} "
            f"{'host' if len(hosts) == 1 else 'hosts'}" + (f", {engine}" if engine else ""))


def _notes(ranks, shown, steps, left_out):
    notes = [f"Left out: {html.escape(problem)}." for problem in left_out]
    if missing := missing_ranks(ranks):
        notes.append(f"There is no file of rank {', '.join(map(str, missing))}: copy the files of all hosts here and run "
                     "<code>unshard timeline</code> again.")
    if lost := {r.rank: r.dropped for r in ranks if r.dropped}:
        notes.append("Events were lost, the buffer was full: " + ", ".join(f"{n} of rank {r}" for r, n in lost.items()) + ".")
    if unfinished := [r.rank for r in ranks if not r.closed]:
        notes.append(f"The files of rank {', '.join(map(str, unfinished))} weren't ended: the rank still runs, was killed, or had no room "
                     "to write. What is in them is shown.")
    doubtful = max((r.clock.uncertainty_ns for r in ranks), default=0)
    if doubtful > 0:
        notes.append(f"Clocks of the hosts are put together to within {doubtful / 1e6:.2f} ms.")
    if shown == set():
        notes.append("No step has ended: of each rank only the first spans are drawn; trace.json has all.")
    elif shown is not None:
        notes.append(f"Tracks are drawn for {len(shown)} of {len(steps)} steps (the first, the slowest and the last ones); figures are of "
                     "all of them, and trace.json has all spans.")
    return "".join(f"<p class=note>{note}</p>" for note in notes)


def _shown_steps(ranks, steps):
    """Steps whose spans are drawn, or None for all. No steps, but more spans than can be drawn: the first ones are."""
    total = sum(len(r.spans) for r in ranks)
    if total <= MOST_SPANS:
        return None
    numbers = sorted({s.step for own in steps.values() for s in own})
    if not numbers:
        return set()
    keep = max(3, len(numbers) * MOST_SPANS // total)
    durations = {}
    for own in steps.values():
        for step in own:
            durations[step.step] = max(durations.get(step.step, 0), step.end - step.begin)
    slowest = sorted(numbers, key=lambda n: -durations[n])[:max(1, keep // 5)]
    chosen = list(dict.fromkeys([numbers[0], *slowest, *reversed(numbers)]))
    return set(chosen[:keep])


class _Texts:
    """Names once each; spans hold their numbers."""

    def __init__(self):
        self.list, self._numbers = [""], {"": 0}

    def number(self, text):
        if text not in self._numbers:
            self._numbers[text] = len(self.list)
            self.list.append(text)
        return self._numbers[text]


def _rank(rank, steps, shown, texts, most):
    mean = averages(steps)
    return {"rank": rank.rank, "host": rank.host,
            "steps": [[s.step, _us(s.begin), _us(s.end), *(_us(s.kinds[k]) for k in KINDS)] for s in steps],
            "mean": {key: round(value, 3) for key, value in mean.items()}, "counted": len(steady(steps)),
            "peak": bytes_text(max((v for n, points in rank.counters.items() if "RSS" in n for _, v in points), default=0)),
            "tracks": _tracks(rank, _drawn(rank, steps, shown, most), texts),
            "memory": {name: _thinned(points) for name, points in rank.counters.items()}}


def _us(value):
    return round(value, 1)


def _drawn(rank, steps, shown, most):
    """The spans that the page holds."""
    if shown is None:
        return rank.spans
    if not shown:
        return rank.spans[:most]
    windows = sorted((s.begin, s.end) for s in steps if s.step in shown)

    def is_inside(time):
        at = bisect.bisect(windows, (time, float("inf"))) - 1
        return at >= 0 and time < windows[at][1]
    return [span for span in rank.spans if is_inside(span.begin)]


def _tracks(rank, spans, texts):
    """[{name, spans: [begin, duration, name, of, bytes, lane]...}], in the order they are drawn."""
    foreground = foreground_threads(rank)
    rows = {"engine": [], "waiting": [], "prefetch": [], "reduction": [], "collectives": []}
    for span in spans:
        if span.lane in _COMPUTE_LANES:
            rows["engine"].append(span)
        elif span.lane in ("gather", "reduce") and span.thread in foreground:
            rows["waiting"].append(span)
        elif span.lane == "bucket":
            rows["reduction"].append(span)
        elif span.lane == "collective":
            rows["collectives"].append(span)
        elif span.lane != "step":
            rows["prefetch"].append(span)
    lanes = {lane: texts.number(lane) for lane in {s.lane for row in rows.values() for s in row}}

    def packed(row):
        for s in row:
            yield from (_us(s.begin), _us(s.end - s.begin), texts.number(s.name), texts.number(s.of), -1 if s.bytes is None else s.bytes,
                        lanes[s.lane])
    return [{"name": name, "spans": list(packed(row))} for name, row in rows.items() if row or name in ("engine", "waiting")]


def _thinned(points):
    """At most so many points, keeping each stretch's greatest: peaks are what a memory curve is looked at for."""
    size = -(-len(points) // _POINTS)
    if size > 1:
        points = [max(points[i:i + size], key=lambda p: p[1]) for i in range(0, len(points), size)]
    return [number for time, value in points for number in (_us(time), value)]
