"""Made-up recordings of a run, as ranks write them: times are known, so that what is made of them can be checked exactly."""
import json

MS = 1000.0                       # microseconds


def event(rank, thread, lane, name, begin_ms, duration_ms, of="", size=None):
    args = {key: value for key, value in (("bytes", size), ("of", of)) if value not in (None, "")}
    return {"name": name, "ph": "X", "pid": rank, "tid": thread, "ts": begin_ms * MS, "dur": duration_ms * MS, "cat": lane, "args": args}


def step_events(rank, step, begin, slow=0.0):
    """One step of 100 ms: forward 30 with a wait of 5 in it, backward 40 (+ slow), drain 20 (- slow), update 6, the rest is the user's."""
    main, side = 100 + rank, 200 + rank
    drained = begin + 71 + slow
    events = [event(rank, main, "step", f"step {step}", begin, 100), event(rank, main, "compute", "forward", begin + 1, 30),
              event(rank, main, "gather", "wait", begin + 4, 5, "blocks.1.up.weight", 4_000_000),
              event(rank, side, "prefetch", "fetch ahead", begin + 10, 8, "blocks.2.up.weight and 3 more", 9_000_000),
              event(rank, main, "compute", "backward", begin + 31, 40 + slow),
              event(rank, main, "reduce", "drain", drained, 20 - slow),
              event(rank, main, "collective", "all_gather", drained + 1, 2, "rounds", 64),
              event(rank, main, "update", "optimizer", begin + 92, 6)]
    events[0]["args"]["step"] = step
    return events + [{"name": "gathered parameters", "ph": "C", "pid": rank, "tid": main, "ts": (begin + at) * MS, "args": {"bytes": value}}
                     for at, value in ((4, 0), (9, 4_000_000), (18, 13_000_000), (70, 0))]


def write_rank(folder, rank, world, events, clock, origin_ns=10**9, run="1-1", host=None, name=""):
    threads = [{"name": "thread_name", "ph": "M", "pid": rank, "tid": 100 + rank, "ts": 0, "args": {"name": "main"}},
               {"name": "thread_name", "ph": "M", "pid": rank, "tid": 200 + rank, "ts": 0, "args": {"name": "prefetch"}}]
    facts = {"rank": rank, "world_size": world, "host": host or f"worker-{rank + 1}", "run": run, "engine": name, "main_thread": 100 + rank,
             "origin_ns": origin_ns, "origin_unix_ms": 1_700_000_000_000}
    readings = [{"name": "clock", "ph": "M", "pid": rank, "tid": 100 + rank, "ts": 0, "args": {"reading": reading}} for reading in clock]
    path = folder / (f"timeline.rank{rank}.{name}.json" if name else f"timeline.rank{rank}.json")
    lines = ",\n".join(map(json.dumps, readings + events + threads))
    head = json.dumps({"displayTimeUnit": "ms", "otherData": facts})[:-1]
    path.write_text(head + ',\n"traceEvents": [\n' + lines + '\n],\n"recording": {"dropped": 0, "closed": true}}\n')
    return path


def write_run(folder, world=2, steps=4, slow_rank=1, slow=8.0):
    """`slow_rank` computes `slow` ms longer, and so waits shorter in the drain."""
    for rank in range(world):
        events = [e for s in range(steps) for e in step_events(rank, s, 50 + 100.0 * s, slow if rank == slow_rank else 0.0)]
        write_rank(folder, rank, world, events, [[10**9, 0, 0]])
