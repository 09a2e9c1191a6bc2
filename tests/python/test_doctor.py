"""`unshard doctor`: from what each rank recorded, who is where. Made-up records first, then real ranks."""
import ctypes
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time

import dense
import pytest
import torch
import torch.nn as nn
from ranks import run_ranks

from unshard.doctor import describe, diagnose
from unshard.doctor.load import Records, check, gather

# ---- made-up records ----------------------------------------------------------------------------------------------------------------

NOW = 1_000_000.0


def entry(index, op="exchange", detail="step: gradient norm", start=0.0, end=0.0, bytes=8, step=None):
    return {"sequence": index, "index": index, "op": op, "detail": detail, "bytes": bytes, "step": index if step is None else step,
            "start": start, "end": end}


def record(rank, entries, world=2, monotonic=100.0, written=NOW, **more):
    group = {"name": "world 0", "ranks": list(range(world)), "entries": entries, "step": 3,
             "phase": {"name": "forward", "detail": "blocks.1", "for_s": 1.0}, **more.pop("group", {})}
    made = {"format": 1, "rank": rank, "world_size": world, "host": f"host{rank}", "pid": 100 + rank, "run": "a", "reason": "asked",
            "written": written, "monotonic": monotonic, "groups": [group],
            "position": {"from": "interpreter",
                         "frames": [frame("train.py", 10 + rank, "__main__"), frame("engine.py", 5, "unshard.engine")]},
            **more}
    assert not check(made)
    return made


def frame(file, line, module):
    return {"file": f"/job/{file}", "line": line, "function": "main", "code": "engine.step()", "module": module}


def steps(count, late=0.0, period=0.1, stay=0.001, slowest=0.0):
    """Entries of `count` steps of a rank that comes `late`; all leave when the slowest has come."""
    return [entry(i, start=i * period + late, end=i * period + slowest + stay) for i in range(count)]


def look(*records, problems=()):
    from unshard.doctor.load import complete
    found = diagnose(gather({r["rank"]: complete(r) for r in records}, problems), now=NOW)
    json.dumps(found)
    return found, describe(found)


def test_ranks_that_agree_are_well():
    found, text = look(record(0, steps(20)), record(1, steps(20)))
    assert found["healthy"] and text.startswith("all ranks agree; nothing is stuck")


def test_a_rank_that_never_came_is_named_with_its_line_and_its_last_call():
    waiting = [*steps(5), entry(5, start=88.0, end=None)]
    found, text = look(record(0, waiting), record(1, steps(5)))
    assert not found["healthy"]
    assert found["difference"]["kind"] == "absent" and found["difference"]["index"] == 5
    first = text.splitlines()[0]
    assert first == "rank 1 never came to collective 5 of world 0: exchange 'step: gradient norm', step 5"
    assert "rank 1 (host host1, pid 101) is elsewhere: forward at 'blocks.1' of step 3, at /job/train.py:11 in main: engine.step()" in text
    assert "its last collective was exchange 'step: gradient norm' of step 4" in text
    assert "rank 0 (host host0, pid 100) waits in it, for 12.0 s, at /job/train.py:10" in text


def test_a_rank_that_is_a_little_behind_is_not_stuck():
    found, text = look(record(0, [*steps(20), entry(20, start=99.9, end=None)]), record(1, steps(20)))
    assert found["healthy"], text


def test_an_older_record_is_not_an_absence():
    """Rank 0 wrote first; what rank 1 has done since needed rank 0, since it has ended."""
    found, text = look(record(0, steps(5)), record(1, steps(9)))
    assert found["healthy"], text


@pytest.mark.parametrize("other", [
    {"op": "check_all_in", "detail": "save_checkpoint(tag=a)"}, {"detail": "gradient rounds"}, {"bytes": 16}],
    ids=["op", "parameter", "size"])
def test_different_calls_at_one_place_are_named(other):
    mine = [*steps(5), entry(5, start=99.0, end=None)]
    theirs = [*steps(5), entry(5, start=99.5, end=None, **other)]
    found, text = look(record(0, mine), record(1, theirs))
    assert found["difference"]["kind"] == "different" and found["difference"]["index"] == 5
    for words in ("in different calls, at collective 5 of world 0, step 5", "rank 0", "host0", "rank 1", "host1", "/job/train.py:11",
                  *[str(value) for value in other.values()]):
        assert words in text, text


def test_bytes_of_a_broadcast_may_differ():
    root = [entry(0, "broadcast", "x", end=1.0, bytes=64)]
    assert look(record(0, root), record(1, [entry(0, "broadcast", "x", end=1.0, bytes=0)]))[0]["healthy"]


def test_a_difference_comes_before_the_absences_that_follow_from_it():
    mine = [*steps(5), entry(5, "all_gather", "a", start=90.0, end=None)]
    theirs = [*steps(5), entry(5, "barrier", "b", start=91.0, end=None)]
    found, _ = look(record(0, mine, world=3), record(1, theirs, world=3), record(2, steps(5), world=3))
    assert found["difference"]["kind"] == "different"


def test_old_entries_that_one_ring_has_lost_are_not_compared():
    found, text = look(record(0, steps(40)), record(1, steps(40)[25:]))
    assert found["healthy"], text


def test_a_missing_file_is_named_and_what_the_others_saw():
    waiting = [*steps(5), entry(5, start=70.0, end=None)]
    peers = {"peers": "rank 0: reducing, step 5 (30.0 s); rank 1: gone (pid 7 died), last seen in backward of step 5"}
    found, text = look(record(0, waiting, group=peers, failure={"kind": "lost rank", "text": "rank 1 is gone", "at": NOW}))
    assert found["missing"] == [1] and not found["healthy"]
    assert "rank1.json is missing" in text and "last seen in backward of step 5" in text
    assert "first failure (lost rank): rank 0 (host host0, pid 100): rank 1 is gone" in text


def test_the_first_failure_is_told_first():
    failures = [{"kind": "lost rank", "text": "rank 1 failed", "at": NOW}, {"kind": "time-out", "text": "no progress", "at": NOW - 1}]
    found, text = look(*[record(rank, steps(3), failure=failures[rank]) for rank in range(2)])
    assert [one["rank"] for one in found["failures"]] == [1, 0]
    assert "first failure (time-out): rank 1 (host host1, pid 101): no progress" in text and "after it failed: rank 0" in text


def test_a_straggler_is_named_by_how_late_it_comes():
    late = 0.02
    ranks = [steps(20, late=late if rank == 2 else 0.001 * rank, slowest=late) for rank in range(4)]
    found, text = look(*[record(rank, entries, world=4) for rank, entries in enumerate(ranks)])
    assert [one["rank"] for one in found["stragglers"]] == [2]
    assert abs(found["stragglers"][0]["late_s"] - late) < 1e-9
    assert "straggler: rank 2 (host host2, pid 102) comes 20.0 ms after the first" in text and found["healthy"]


def test_taking_turns_at_being_late_is_no_straggling():
    ranks = [[entry(i, start=i * 0.1 + (0.02 if i % 2 == rank else 0), end=i * 0.1 + 0.021) for i in range(20)] for rank in range(2)]
    assert look(*[record(rank, entries) for rank, entries in enumerate(ranks)])[0]["stragglers"] == []


def test_waking_late_from_the_collective_before_is_no_straggling():
    """Rank 1 computes for 30 ms; rank 0, which waited for it, wakes 9 ms after it and so comes last to what follows at once."""
    ranks = [[], []]
    for i in range(20):
        begin = i * 0.05
        for rank, (came, left) in enumerate([(begin, begin + 0.039), (begin + 0.03, begin + 0.03)]):
            ranks[rank] += [entry(2 * i, detail="a", start=came, end=left), entry(2 * i + 1, detail="b", start=left, end=begin + 0.04)]
    assert [one["rank"] for one in look(*[record(rank, entries) for rank, entries in enumerate(ranks)])[0]["stragglers"]] == [1]


def test_who_had_failed_before_is_not_said_to_be_absent():
    failure = {"kind": "time-out", "text": "no progress", "at": NOW - 3}
    ranks = [record(0, steps(5), failure=failure), record(1, [*steps(5), entry(5, start=99.0, end=None)])]
    found, text = look(*ranks)
    assert found["difference"] is None and text.startswith("first failure (time-out): rank 0"), text


def linked(rates, hosts="abc", lost=0):
    """One rank a host; rates[(from, to)] in bytes/s."""
    made = []
    for rank, host in enumerate(hosts):
        links = [{"peer": f"10.0.0.{hosts.index(to)}", "bytes_sent": 1 << 30, "bytes_received": 0, "connections": 1, "round_trip_s": 0.001,
                  "send_bytes_per_s": rate, "retransmitted_segments": lost} for (source, to), rate in rates.items() if source == host]
        made.append(record(rank, steps(3), world=len(hosts), host=host, addresses=[f"10.0.0.{rank}", "172.17.0.1"], links=links))
    return made


def test_a_slow_link_is_named_by_its_ends():
    rates = {(a, b): 1.2e8 for a in "abc" for b in "abc" if a != b} | {("a", "c"): 1.2e7}
    found, text = look(*linked(rates))
    assert [(one["source"], one["target"]) for one in found["slow_links"]] == [("a", "c")]
    assert "slow link: from host a to host c, 96.0 Mbit/s; the others do 960.0 Mbit/s" in text


def test_a_host_with_slow_links_only_is_named_once():
    rates = {(a, b): 1e7 if "d" in (a, b) else 1e8 for a in "abcd" for b in "abcd" if a != b}
    found, text = look(*linked(rates, "abcd"))
    assert [(one["source"], one["target"]) for one in found["slow_links"]] == [("", "d")]
    assert "slow link: of host d" in text


def test_links_alike_are_not_slow_and_lossy_ones_are_named():
    rates = {(a, b): 1e8 + 1e6 * i for i, (a, b) in enumerate((a, b) for a in "abc" for b in "abc" if a != b)}
    assert look(*linked(rates))[0]["slow_links"] == []
    assert "lossy link: from host a to host b, 10.8% of its packets are sent again" in look(*linked({("a", "b"): 1e8}, lost=80_000))[1]


def test_versions_that_differ_are_a_problem():
    found, text = look(record(0, steps(3), versions={"torch": "2.13"}), record(1, steps(3), versions={"torch": "2.12"}))
    assert not found["healthy"] and "torch differs: 2.13 on rank 0, 2.12 on rank 1" in text


def test_the_users_line_is_found_among_libraries_and_in_a_look_from_outside():
    from unshard.doctor.position import users_line
    site = "/venv/lib/python3.11/site-packages"
    inside = [frame("train.py", 1, "__main__"), {**frame("x", 2, "transformers.trainer"), "file": f"{site}/transformers/trainer.py"},
              {**frame("x", 3, "torch.nn.modules.module"), "file": f"{site}/torch/nn/modules/module.py"},
              frame("threading.py", 4, "threading")]
    assert users_line({"position": {"frames": inside}})["file"] == "/job/train.py"
    text = ('Thread 0x01 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 9 in wait\n\n'
            f'Thread 0x02 (most recent call first):\n  File "{site}/torch/x.py", line 3 in f\n  File "/job/train.py", line 7 in main\n')
    assert users_line({"position": {"text": text}})["line"] == 7
    assert users_line({"position": None}) is None


DAMAGED = {
    "empty": "", "half": '{"format": 1, "rank": 0, "wor', "not a record": "[1, 2]", "another format": '{"format": 9}',
    "no text": "\0\0\xff",
    "wrong types": json.dumps({"format": 1, "rank": "0"}),
    "rank beyond": json.dumps({**record(0, []), "rank": 7}),
    "a bad entry": json.dumps({**record(0, []), "groups": [{"name": "x", "ranks": [0], "entries": [{"index": 1}]}]}),
    "a bad group": json.dumps({**record(0, []), "groups": [3]}),
}


PARTS = {"failure": ["x", {"kind": "time-out"}, {"text": "why"}, True], "versions": [None, {"torch": []}], "addresses": [None, [1]],
         "links": [None, [1], [{"bytes_sent": None}]], "world_size": [True, 10**400, 1 << 40], "written": [float("nan"), 10**400],
         "position": ["x", {"frames": 1}], "run": [7], "text": [None]}
PARTS_OF_GROUP = {"phase": ["x", {"detail": "y"}], "waiting": [[1], {"where": "x"}, {"where": "x", "for_s": None}], "ranks": [[7], ["0"]],
                  "entries": [[entry(1, end="x")]], "peers": [1]}
DAMAGED |= {f"{key} {number}": json.dumps({**record(0, []), key: value}) for key, values in PARTS.items()
            for number, value in enumerate(values)}
DAMAGED |= {f"group's {key} {number}": json.dumps({**record(0, []), "groups": [{**record(0, [])["groups"][0], key: value}]})
            for key, values in PARTS_OF_GROUP.items() for number, value in enumerate(values)}
DAMAGED["deep"] = "[" * 200_000


def test_calls_far_apart_are_compared_at_once():
    found, _ = look(record(0, [entry(0), entry(1 << 60, end=None)]), record(1, [entry(0)]))
    assert found["difference"]["index"] == 1 << 60


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_is_a_line_and_the_others_are_used(tmp_path, text, capsys):
    from unshard.doctor import main
    (tmp_path / "rank0.json").write_text(text)
    (tmp_path / "rank1.json").write_text(json.dumps(record(1, steps(3))))
    (tmp_path / "rank1.former.json").write_text("of another run")
    assert main([str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "rank0.json is damaged" in said and "no record of rank 0 of 2" in said and "rank 1 on host host1" in said
    assert main([str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["missing"] == [0]


def test_a_record_of_another_run_is_left_out():
    records = gather({0: record(0, steps(3)), 1: record(1, steps(3), run="b", written=NOW - 99)})
    assert list(records.by_rank) == [0] and "rank 1's record is of another run" in records.problems[0]


def test_nothing_to_look_at_is_said(tmp_path, capsys):
    from unshard.doctor import main
    assert main([str(tmp_path)]) == 2 and main([str(tmp_path / "none")]) == 2 and main(["4194305"]) == 2
    with subprocess.Popen(["sleep", "60"]) as no_rank:
        assert main([str(no_rank.pid)]) == 2
        no_rank.kill()
    said = capsys.readouterr().out
    for words in ("no records\nthere is no rank<N>.json", "--record-at-end", "no such file or directory; give the folder of --run-dir",
                  "there is no process 4194305", "is no rank of an Unshard run"):
        assert words in said, said
    assert not describe(diagnose(Records({}, []))).startswith("all")


# ---- real ranks ---------------------------------------------------------------------------------------------------------------------

MEMORY = pytest.mark.parametrize("memory", [{}, {"UNSHARD_SHARE_MEMORY": "off"}], ids=["shared", "unshared"])


def make_engine(stage=1, **settings):
    import unshard
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    return unshard.initialize(model=model, model_parameters=list(model.parameters()), config=dense.config(stage, unshard=settings))[0]


def train(engine, count=1):
    for _ in range(count):
        engine.backward(engine(torch.ones(2, 32)).sum())
        engine.step()


def doctor(*arguments, json_too=False):
    command = [sys.executable, "-m", "unshard.doctor", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    return done.returncode, done.stdout


def wait_for(path, limit=40):
    end = time.monotonic() + limit
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} didn't appear"
        time.sleep(0.02)


def oversleeps(rank, world, folder, how):
    engine = make_engine(collective_check_s=1)
    train(engine, 2)
    if rank == 1:
        pathlib.Path(folder, "asleep").touch()
        sleep_with_the_lock() if how == "with the lock" else sleep_until(pathlib.Path(folder, "wake"))
    train(engine)


def sleep_with_the_lock():
    ctypes.PyDLL(None).sleep(4)                     # PyDLL keeps the interpreter's lock


def sleep_until(path):
    while not path.exists():
        time.sleep(0.05)


@pytest.mark.parametrize("memory, how", [({}, "without the lock"), ({"UNSHARD_SHARE_MEMORY": "off"}, "without the lock"),
                                         ({}, "with the lock")], ids=["shared", "unshared", "lock"])
def test_a_running_job_warns_once_and_when_asked_names_the_sleeper_and_its_line(tmp_path, memory, how):
    pids, said = {}, {}

    def start(rank, command, **options):
        from ranks import rank_env
        process = subprocess.Popen(command, env=rank_env(rank, 2, port, memory), start_new_session=True, **options)
        pids[rank] = process.pid
        return process

    def ask():
        wait_for(tmp_path / "asleep")
        time.sleep(1.5)
        said["code"], said["text"] = doctor(pids[0])
        (tmp_path / "wake").touch()

    from ranks import free_port
    port = free_port()
    asking = threading.Thread(target=ask)
    asking.start()
    outcomes = run_ranks(2, oversleeps, str(tmp_path), how, limit=60, start=start, expect_failure=True)
    asking.join()
    assert [o.code for o in outcomes] == [0, 0], [o.output[-2000:] for o in outcomes]
    warnings = [line for line in outcomes[0].output.splitlines() if "still waiting" in line and "step 2" in line]
    # Without shared memory gradients travel on a thread of their own, which may be the first to have waited for long.
    places = ("engine.step", "1.bias") if memory else ("engine.step",)
    assert len(warnings) == 1 and "rank 1" in warnings[0] and any(p in warnings[0] for p in places), outcomes[0].output[-2000:]
    assert "still waiting" not in outcomes[1].output
    text = said["text"]
    assert said["code"] == 1, text
    assert text.startswith("rank 1 never came to collective"), text
    line = next(line for line in text.splitlines() if "rank 1" in line and "is elsewhere" in line)
    assert f"pid {pids[1]}" in line and "test_doctor.py" in line and "in sleep_" in line, text
    if how != "with the lock":                      # a look from outside has no source text
        assert ": time.sleep(0.05)" in line, text
    line = next(line for line in text.splitlines() if "rank 0" in line and "waits in it" in line)
    assert f"pid {pids[0]}" in line and "in train: engine.step()" in line, text


def part_ways(rank, world, folder):
    engine = make_engine()
    train(engine, 2)
    if rank == 0:
        engine.save_checkpoint(folder, tag="a")
    train(engine)


@MEMORY
def test_save_on_one_rank_and_step_on_the_other_is_an_error_at_once_on_both_and_the_folder_tells(tmp_path, memory):
    outcomes = run_ranks(2, part_ways, str(tmp_path / "saved"), expect_failure=True, limit=40,
                         env={"UNSHARD_RUN_DIR": str(tmp_path), **memory})
    assert all(o.code not in (0, None) for o in outcomes), [o.output[-1500:] for o in outcomes]
    # Within the limit is at once: collective_check_s is 60.
    both = [f"save({tmp_path / 'saved'})" in o.output and "engine.step" in o.output for o in outcomes]
    if memory:                                      # who finds it last may find the other gone with it
        assert any(both) and all(named or "is gone" in o.output for named, o in zip(both, outcomes)), [o.output[-2000:] for o in outcomes]
    else:
        assert all(both), [o.output[-2000:] for o in outcomes]
    code, text = doctor(tmp_path)
    assert code == 1 and text.startswith("the ranks are in different calls, at collective"), text
    call = f"check_all_in 'save({tmp_path / 'saved'})'"[:100]                 # long ones are cut
    assert "rank 0" in text and call in text and "in part_ways: engine.save_checkpoint" in text, text
    assert "rank 1" in text and "'engine.step'" in text and "in train: engine.step()" in text, text


def stalls(rank, world, folder):
    engine = make_engine(timeout_s=2, run_dir=folder)
    train(engine, 2)
    if rank == 1:
        time.sleep(5)
    train(engine)


@MEMORY
def test_a_time_out_leaves_the_records_of_all_ranks(tmp_path, memory):
    outcomes = run_ranks(2, stalls, str(tmp_path), expect_failure=True, limit=40, env=memory)
    assert outcomes[0].code not in (0, None) and "unshard doctor" in outcomes[0].output, outcomes[0].output[-2000:]
    code, text = doctor(tmp_path)
    assert code == 1 and text.startswith("rank 1 never came to collective"), text
    assert "in stalls: time.sleep(5)" in text and "first failure (time-out): rank 0" in text, text


RAISES = """
import os, sys, test_doctor
engine = test_doctor.make_engine()
test_doctor.train(engine, 2)
if os.environ["RANK"] == "1":
    raise RuntimeError("my data is broken")
test_doctor.train(engine)
"""


@MEMORY
def test_the_others_hear_of_an_exception_that_nobody_catches_and_the_doctor_tells_it(tmp_path, memory):
    from ranks import free_port, rank_env
    (tmp_path / "raises.py").write_text(RAISES)
    port, run = free_port(), tmp_path / "run"
    here = {"UNSHARD_RUN_DIR": str(run), "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])}
    ranks = [subprocess.Popen([sys.executable, str(tmp_path / "raises.py")], env=rank_env(rank, 2, port, {**here, **memory}),
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank in range(2)]
    try:
        said = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, 1], said
    assert re.search(r"rank 1( \(pid \d+\))? failed: RuntimeError: my data is broken", said[0]), said[0][-2000:]
    code, text = doctor(run)
    assert code == 1 and "first failure (exception): rank 1" in text and "RuntimeError: my data is broken" in text, text
    assert 'raise RuntimeError("my data is broken")' in text, text


def ends(rank, world):
    engine = make_engine(stage=3)
    for _ in range(20):
        if rank == 1:
            time.sleep(0.03)
        train(engine)


def test_a_run_that_ends_well_tells_its_straggler(tmp_path):
    run_ranks(2, ends, env={"UNSHARD_RUN_DIR": str(tmp_path), "UNSHARD_RECORD_AT_END": "1"})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank0.json", "rank1.json"]
    code, text = doctor(tmp_path)
    assert code == 0 and text.startswith("all ranks agree; nothing is stuck"), text
    assert "straggler: rank 1" in text and "straggler: rank 0" not in text, text


def test_an_exception_that_nobody_catches_is_told_with_its_line(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import torch, unshard\n"
                      "engine, *_ = unshard.initialize(model=torch.nn.Linear(2, 2), config={'train_batch_size': 1})\n"
                      "raise KeyError('no such thing')\n")
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, str(script)], env={**clean, "UNSHARD_RUN_DIR": str(tmp_path)}, capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 1 and "no such thing" in done.stderr
    code, text = doctor(tmp_path)
    assert code == 1 and "first failure (exception): rank 0" in text and "KeyError: 'no such thing'" in text, text
    assert f"at {script}:3 in <module>: raise KeyError('no such thing')" in text, text
