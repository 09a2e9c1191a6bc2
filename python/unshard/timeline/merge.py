"""All ranks' recordings as one trace (Perfetto, chrome://tracing) and one page."""
import json
import os
import pathlib

from unshard.timeline.files import TimelineError, engines_of, read_ranks

_THREAD_ORDER = {"main": 0, "autograd": 1, "prefetch": 2, "reduction": 3}


def write_outputs(folder, only=None, left_out=None):
    """trace.json and timeline.html in `folder`, for each engine that was recorded (or the one named). Returns the paths; raises
    TimelineError. `left_out`: a list that gets a line for each file that can't be read, and isn't in the outputs then."""
    from unshard.timeline.page import page
    folder = pathlib.Path(folder)
    engines = engines_of(folder) if folder.is_dir() else {}
    if not engines:
        raise TimelineError(f"{folder}: no timeline.rank<N>.json in it; run with --timeline {folder}, or give the folder of a run that did")
    written = []
    for engine, files in engines.items():
        if only not in (None, engine):
            continue
        damaged = None if left_out is None else []
        ranks, suffix = read_ranks(files, damaged), f".{engine}" if engine else ""
        written.append(_write(folder / f"trace{suffix}.json", trace(ranks)))
        written.append(_write(folder / f"timeline{suffix}.html", page(ranks, engine, damaged or ())))
        if damaged:
            left_out.extend(damaged)
    return written


def missing_ranks(ranks):
    return sorted(set(range(ranks[0].world_size)) - {r.rank for r in ranks}) if ranks else []


def trace(ranks):
    """The text of a trace in Chrome's format: a process is a rank, a thread a thread; sorted by time."""
    names, events = [], []
    for rank in ranks:
        named = [("process_name", 0, {"name": f"rank {rank.rank} ({rank.host})"}), ("process_sort_index", 0, {"sort_index": rank.rank})]
        for thread, name in rank.thread_names.items():
            named += [("thread_name", thread, {"name": name}), ("thread_sort_index", thread, {"sort_index": _THREAD_ORDER.get(name, 4)})]
        names += [{"name": name, "ph": "M", "pid": rank.rank, "tid": thread, "ts": 0, "args": args} for name, thread, args in named]
        events += [_complete(rank, span) for span in rank.spans]
        events += [{"name": name, "ph": "C", "pid": rank.rank, "tid": rank.main_thread, "ts": round(time, 3), "args": {"bytes": value}}
                   for name, points in rank.counters.items() for time, value in points]
    events.sort(key=lambda e: e["ts"])
    about = {"ranks": len(ranks), "missing_ranks": missing_ranks(ranks),
             "clock_uncertainty_us": {str(r.rank): round(r.clock.uncertainty_ns / 1e3, 1) for r in ranks},
             "dropped_events": {str(r.rank): r.dropped for r in ranks if r.dropped}}
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in names + events)
    return f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n{lines}\n]}}\n'


def _complete(rank, span):
    args = {"of": span.of, "bytes": span.bytes, "step": span.step}
    return {"name": span.name, "cat": span.lane, "ph": "X", "pid": rank.rank, "tid": span.thread, "ts": round(span.begin, 3),
            "dur": round(max(span.end - span.begin, 0), 3), "args": {key: value for key, value in args.items() if value not in ("", None)}}


def _write(path, text):
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
    return path
