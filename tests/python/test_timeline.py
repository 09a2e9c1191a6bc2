"""The timeline: what ranks record covers their steps, becomes one trace with clocks put right, and one page that a browser shows."""
import html
import html.parser
import json
import re
import shutil
import subprocess
import sys

import dense
import pytest
import timeline_records as records
from ranks import run_ranks
from unshard.timeline import finish as finishing
from unshard.timeline import main as command
from unshard.timeline import write_outputs
from unshard.timeline.clock import Clock
from unshard.timeline.files import TimelineError, read_ranks
from unshard.timeline.summary import KINDS, averages, steps_of

STEPS = 5
PARTS = ["forward", "backward", "meet the other ranks", "drain", "agree on the norm", "settle values written", "optimizer", "publish"]


# ---- a real run -----------------------------------------------------------------------------------------------------------------------
def train(rank, world, folder):
    import torch
    import unshard
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    engine, *_ = unshard.initialize(model=model, config=dense.config(3, unshard={"timeline": folder, "share_memory": "off"}))
    for _ in range(STEPS):
        engine.backward(engine(torch.randn(8, 64)).square().mean())
        engine.step()
    engine.destroy()


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("timeline") / "not there yet"
    run_ranks(2, train, str(folder), limit=60)
    return folder


def test_files_and_outputs_are_there(run_folder):
    assert sorted(p.name for p in run_folder.iterdir()) == ["timeline.html", "timeline.rank0.json", "timeline.rank1.json", "trace.json"]
    documents = [_document(run_folder, rank) for rank in range(2)]
    assert all(d["recording"] == {"dropped": 0, "closed": True} for d in documents)
    assert len({d["otherData"]["run"] for d in documents}) == 1


def _file(folder, rank):
    return folder / f"timeline.rank{rank}.json"


def _document(folder, rank):
    return json.loads(_file(folder, rank).read_text())


def test_spans_cover_the_steps(run_folder):
    for rank in read_ranks([_file(run_folder, rank) for rank in range(2)]):
        steps = steps_of(rank)
        assert [s.step for s in steps] == list(range(STEPS))
        for step in steps:
            assert sum(step.kinds.values()) == pytest.approx(step.end - step.begin, abs=1e-3)
            assert all(step.kinds[kind] > 0 for kind in KINDS)
            parts = [s for s in rank.spans if s.lane in ("compute", "reduce", "update") and step.begin <= s.begin < step.end]
            assert [s.name for s in parts] == PARTS
            assert all(before.end <= after.begin for before, after in zip(parts, parts[1:]))
        lanes = {s.lane for s in rank.spans}
        assert {"step", "compute", "gather", "reduce", "update", "collective"} <= lanes
        # Without shared memory every weight is gathered: by a touch, or ahead of it. They are named, with their bytes.
        gathers = [s for s in rank.spans if s.lane in ("gather", "prefetch")]
        assert gathers and all(s.of and s.bytes > 0 for s in gathers)
        kinds = {"parameters at rest", "gathered parameters", "gradients", "optimizer", "process (RSS)", "process (PSS)"}
        assert kinds <= set(rank.counters)
        assert max(value for _, value in rank.counters["gathered parameters"]) > 0


def test_trace_is_what_viewers_read(run_folder):
    trace = json.loads((run_folder / "trace.json").read_text())
    events = trace["traceEvents"]
    names = {(e["pid"], e["name"]): e["args"] for e in events if e["ph"] == "M" and e["name"].startswith("process_")}
    assert {pid for pid, _ in names} == {0, 1}
    assert re.fullmatch(r"rank 1 \(.+\)", names[1, "process_name"]["name"])
    assert {"main", "reduction"} <= {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    timed = [e for e in events if e["ph"] != "M"]
    assert {e["ph"] for e in timed} == {"X", "C"}
    assert [e["ts"] for e in timed] == sorted(e["ts"] for e in timed) and timed[0]["ts"] >= 0
    assert all(e["dur"] >= 0 for e in timed if e["ph"] == "X")
    _assert_nested([e for e in timed if e["ph"] == "X" and e["cat"] != "step"])


def _assert_nested(spans):
    """Per thread each span is inside another one or beside it, as viewers take for granted (to the thousandth of a microsecond)."""
    by_thread = {}
    for span in spans:
        by_thread.setdefault((span["pid"], span["tid"]), []).append((span["ts"], span["ts"] + span["dur"]))
    for intervals in by_thread.values():
        open_ends = []
        for begin, end in sorted(intervals, key=lambda i: (i[0], -i[1])):
            while open_ends and open_ends[-1] <= begin + 0.003:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 0.003
            open_ends.append(end)


def test_clocks_of_one_machine_agree(run_folder):
    """Without shared memory ranks count as hosts of their own, so their clocks are compared; here both are the same clock."""
    readings = [[e["args"]["reading"] for e in _document(run_folder, rank)["traceEvents"] if e["name"] == "clock"] for rank in (0, 1)]
    for own in readings:
        assert len(own) == 2
        assert all(abs(offset) <= max(uncertainty, 1) for _, offset, uncertainty in own)
    assert [reading[1:] for reading in readings[0]] == [[0, 0]] * 2


def test_at_exit_and_a_second_engine(tmp_path):
    run_ranks(2, three_engines, str(tmp_path), limit=60)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "timeline.engine1.html", "timeline.html", "timeline.rank0.engine1.json", "timeline.rank0.json", "timeline.rank1.engine1.json",
        "timeline.rank1.json", "trace.engine1.json", "trace.json"]
    for path in tmp_path.glob("timeline.rank*.json"):
        assert json.loads(path.read_text())["recording"]["closed"]


def three_engines(rank, world, folder):
    """The last one doesn't record. No destroy(): the files are closed at exit."""
    import torch
    import unshard
    three_engines.kept = []
    for settings in ({"timeline": folder}, {"timeline": folder}, {}):
        engine, *_ = unshard.initialize(model=torch.nn.Linear(16, 16), config=dense.config(1, unshard=settings))
        engine.backward(engine(torch.randn(2, 16)).square().mean())
        engine.step()
        three_engines.kept.append(engine)


@pytest.mark.parametrize("cycle", [False, True])
def test_an_engine_that_is_gone_before_the_exit(tmp_path, cycle):
    run_ranks(2, local_engine, str(tmp_path), cycle, limit=60)
    assert {"trace.json", "timeline.html"} <= {p.name for p in tmp_path.iterdir()}
    assert all(_document(tmp_path, rank)["recording"]["closed"] for rank in range(2))
    assert [s.step for s in steps_of(read_ranks([_file(tmp_path, 0)])[0])] == [0]


def local_engine(rank, world, folder, cycle):
    """No destroy(), and nothing keeps the engine: it is gone when the function returns (or, in a cycle, whenever it is collected)."""
    import gc
    import weakref
    import torch
    import unshard

    def main():
        engine, *_ = unshard.initialize(model=torch.nn.Linear(16, 16), config=dense.config(3, unshard={"timeline": folder}))
        engine.backward(engine(torch.randn(2, 16)).square().mean())
        engine.step()
        if cycle:
            engine.itself = [engine]
        return weakref.ref(engine)
    kept = main()
    if not cycle:
        gc.collect()
        assert kept() is None


def test_two_models_in_one_init_have_one_timeline(tmp_path):
    run_ranks(2, two_models, str(tmp_path), limit=60)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["timeline.html", "timeline.rank0.json", "timeline.rank1.json", "trace.json"]
    rank = read_ranks([_file(tmp_path, 1)])[0]
    assert sum(s.name == "forward" for s in rank.spans) == 2


def two_models(rank, world, folder):
    """The engine that opened the timeline ends last, and puts it together; the other one leaves it alone."""
    import pathlib
    import torch
    import unshard
    config = dense.config(3, unshard={"timeline": folder})
    with unshard.zero.Init(config_dict_or_path=config):
        models = [torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)]
    engines = [unshard.initialize(model=model, config=config)[0] for model in models]
    for engine in engines:
        engine.backward(engine(torch.randn(2, 16)).square().mean())
        engine.step()
    engines[1].destroy()
    assert not (pathlib.Path(folder) / "trace.json").exists()
    engines[0].destroy()
    if rank == 0:
        assert (pathlib.Path(folder) / "trace.json").exists()


def test_a_full_disk_on_one_host_stops_nobody(tmp_path):
    _file(tmp_path, 1).symlink_to("/dev/full")
    outcomes = run_ranks(2, two_hosts, str(tmp_path), limit=60, expect_failure=True)
    assert [o.code for o in outcomes] == [0, 0], "\n".join(o.output for o in outcomes)
    assert "can't be written: No space left on device; recording ends" in outcomes[1].output
    events = _document(tmp_path, 0)["traceEvents"]
    assert sum(e["name"] == "clock" for e in events) == 3            # at the start, after the first step and the tenth
    assert max(e["args"]["bytes"] for e in events if e["name"] == "gathered parameters") > 0        # of the other host's


def two_hosts(rank, world, folder):
    import os
    os.environ["UNSHARD_HOST"] = f"host{rank}"
    import torch
    import unshard
    engine, *_ = unshard.initialize(model=torch.nn.Linear(64, 64), config=dense.config(3, unshard={"timeline": folder}))
    for _ in range(12):
        engine.backward(engine(torch.randn(2, 64)).square().mean())
        engine.step()
    engine.destroy()


# ---- made-up recordings ---------------------------------------------------------------------------------------------------------------
def test_shares_of_a_known_step(tmp_path):
    records.write_run(tmp_path, world=2, steps=4, slow_rank=1, slow=8.0)
    ranks = read_ranks(sorted(tmp_path.glob("timeline.rank*.json")))
    mean = [averages(steps_of(rank)) for rank in ranks]
    assert mean[0] == pytest.approx({"compute": 65, "gather": 5, "reduce": 20, "update": 6, "other": 4, "step": 100})
    assert mean[1] == pytest.approx({"compute": 73, "gather": 5, "reduce": 12, "update": 6, "other": 4, "step": 100})
    write_outputs(tmp_path)
    text = re.sub(r"<[^>]+>", "", (tmp_path / "timeline.html").read_text())
    assert "Slowest: rank 1 (worker-2): 83.0 ms of its own work a step, 8.0 ms more than rank 0, the fastest" in text
    assert "Longest wait: 20.0 ms on rank 0 in step" in text


def test_clocks_are_put_right(tmp_path):
    """Rank 1's clock is 3 s behind and loses 50 parts in a million; what both did at once is at one time in the trace."""
    behind, drift, start, true_span = 3e9, 50e-6, 10**9, 400e6
    def own(true_ns):
        return (true_ns - behind) / (1 + drift)
    readings = [[round(own(t)), round(t - own(t)), 20_000] for t in (start, start + true_span / 2, start + true_span)]
    records.write_rank(tmp_path, 0, 2, records.step_events(0, 0, 100) + records.step_events(0, 1, 300), [[start, 0, 0]], start)
    origin = round(own(start))
    events = records.step_events(1, 0, 100) + records.step_events(1, 1, 300)
    for event in events:
        event["ts"] = (own(start + event["ts"] * 1e3) - origin) / 1e3
        if "dur" in event:
            event["dur"] /= 1 + drift
    records.write_rank(tmp_path, 1, 2, events, readings, origin)
    zero, one = read_ranks(sorted(tmp_path.glob("timeline.rank*.json")))
    for ours, theirs in zip(zero.spans, one.spans, strict=True):
        assert (theirs.begin, theirs.end) == pytest.approx((ours.begin, ours.end), abs=0.05)      # microseconds


def test_a_bad_reading_doesnt_turn_time_back():
    clock = Clock([[0, 0, 10], [1_000_000, 4_000_000, 5_000_000], [10**9, 1000, 10]])       # 4 ms off within 1 ms: no clock does that
    assert len(clock.readings) == 2
    times = [clock.corrected(t) for t in range(0, 2 * 10**9, 10**7)]
    assert times == sorted(times) and abs(times[50] - 5 * 10**8) < 1000
    assert Clock([]).corrected(5) == 5


def test_files_of_another_run_and_missing_ranks(tmp_path):
    records.write_run(tmp_path, world=2, steps=3)
    old = _document(tmp_path, 1)
    old["otherData"].update(rank=2, run="0-0", origin_unix_ms=1_600_000_000_000)
    _file(tmp_path, 2).write_text(json.dumps(old))
    _file(tmp_path, 1).unlink()
    write_outputs(tmp_path)
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {e["pid"] for e in trace["traceEvents"]} == {0} and trace["otherData"]["missing_ranks"] == [1]
    assert "There is no file of rank 1" in (tmp_path / "timeline.html").read_text()


def test_a_file_that_was_cut_short_is_read_up_to_its_last_whole_line(tmp_path):
    records.write_run(tmp_path, world=2, steps=6)
    path = _file(tmp_path, 1)
    text = path.read_text()
    whole = read_ranks([path])[0]
    for length in range(text.index('"step 3"'), len(text) - 2, 97):
        path.write_text(text[:length])
        rank = read_ranks([path])[0]
        assert not rank.closed and rank.clock.readings == whole.clock.readings
        assert [s.step for s in steps_of(rank)][:3] == [0, 1, 2]
        assert all(span in whole.spans for span in rank.spans)
    # New lines over the old end, and the process was killed in the middle: what is left of the old end doesn't count.
    at = text.index('{"name": "step 3"')
    path.write_text(text[:at] + '{"name": "new", "ph": ' + text[-200:])
    assert [s.step for s in steps_of(read_ranks([path])[0])] == [0, 1, 2]
    write_outputs(tmp_path)
    assert "The files of rank 1 weren't ended" in (tmp_path / "timeline.html").read_text()


@pytest.mark.parametrize("damage", [
    lambda d: d["otherData"].pop("host"), lambda d: d["otherData"].update(rank="first"), lambda d: d.update(traceEvents=[1]),
    lambda d: d.update(recording=None), lambda d: d["traceEvents"][1].pop("ts"), lambda d: d["traceEvents"][1].update(dur="long"),
    lambda d: d["traceEvents"][0]["args"].update(reading=[1]), lambda d: d.update(otherData=[]),
    lambda d: d["traceEvents"][1].update(args=None), lambda d: d.update(otherData=None), lambda d: d["otherData"].pop("origin_unix_ms"),
    lambda d: d["otherData"].update(rank=float("inf")), lambda d: d["otherData"].update(world_size=1 << 40)])
def test_a_damaged_file_is_named_in_one_line(tmp_path, capsys, damage):
    records.write_run(tmp_path)
    document = _document(tmp_path, 1)
    damage(document)
    _file(tmp_path, 1).write_text(json.dumps(document))
    assert command([str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"unshard timeline: left out: {_file(tmp_path, 1)}: damaged") and said.count("\n") == 1
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["missing_ranks"] == [1]
    assert f"Left out: {_file(tmp_path, 1)}: damaged" in (tmp_path / "timeline.html").read_text()
    _file(tmp_path, 0).unlink()
    assert command([str(tmp_path)]) == 1 and capsys.readouterr().err.startswith(f"unshard timeline: {_file(tmp_path, 1)}: damaged")


def test_a_rank_alone_isnt_said_to_wait_for_others(tmp_path):
    records.write_run(tmp_path, world=1)
    write_outputs(tmp_path)
    assert "Longest wait" not in (tmp_path / "timeline.html").read_text()


def test_whose_files_werent_ended_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(finishing, "_PATIENCE_S", 0.1)
    records.write_run(tmp_path, world=3)
    path = _file(tmp_path, 2)
    path.write_text(path.read_text().replace('"closed": true', '"closed": false'))
    said = []
    finishing.finish(tmp_path, 3, "", said.append)
    assert len(said) == 2 and str(tmp_path / "trace.json") in said[1]
    assert said[0].startswith("timeline: the files of rank 2 weren't ended")


def test_run_records_in_the_same_folder_are_left_alone(tmp_path):
    """`--run-dir` and `--timeline` may name one folder."""
    records.write_run(tmp_path)
    (tmp_path / "rank0.json").write_text('{"rank": 0}')
    write_outputs(tmp_path)
    assert (tmp_path / "rank0.json").read_text() == '{"rank": 0}'


@pytest.mark.parametrize("text, message", [("{", "line 1 isn't JSON"), ("", "line 1 isn't JSON"), ("{}", "not a timeline"),
                                           (None, "no timeline.rank<N>.json")])
def test_what_cant_be_merged_is_said(tmp_path, text, message):
    if text is not None:
        _file(tmp_path, 0).write_text(text)
    with pytest.raises(TimelineError, match=message):
        write_outputs(tmp_path)
    done = subprocess.run([sys.executable, "-m", "unshard.cli", "timeline", str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr


def test_the_command_merges(tmp_path):
    records.write_run(tmp_path)
    done = subprocess.run([sys.executable, "-m", "unshard.cli", "timeline", str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "trace.json"), str(tmp_path / "timeline.html")]


# ---- the page -------------------------------------------------------------------------------------------------------------------------
def test_a_large_run_gives_a_page_that_can_be_drawn(tmp_path, monkeypatch):
    from unshard.timeline import page
    monkeypatch.setattr(page, "MOST_SPANS", 100)
    records.write_run(tmp_path, steps=40)
    write_outputs(tmp_path)
    data = _data(tmp_path / "timeline.html")
    assert len(data["steps"]) == 40 and 3 <= len(data["shown"]) < 12
    assert {0, 39} <= set(data["shown"])
    assert sum(len(track["spans"]) // 6 for rank in data["ranks"] for track in rank["tracks"]) <= 100
    assert all(len(rank["steps"]) == 40 for rank in data["ranks"])


class _Page(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.links, self.data, self._in_data = [], "", False

    def handle_starttag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("src", "href", "action", "data", "srcset")]
        self._in_data = dict(attributes).get("type") == "application/json"

    def handle_data(self, data):
        if self._in_data:
            self.data += data


def _data(path):
    page = _Page()
    page.feed(path.read_text())
    return json.loads(page.data)


def test_the_page_asks_nobody_for_anything(run_folder):
    text = (run_folder / "timeline.html").read_text()
    page = _Page()
    page.feed(text)
    assert page.links == ["data:,"]                     # the icon, so that none is asked for
    assert not re.search(r"\b(?:https?:)?//[\w.-]+\.\w+/?|@import|url\(|fetch\(|XMLHttpRequest|import\(", text)
    assert "@@" not in text
    assert [rank["rank"] for rank in json.loads(page.data)["ranks"]] == [0, 1]


def test_names_cant_break_out_of_the_page(tmp_path):
    events = records.step_events(0, 0, 10)
    events[2]["args"]["of"] = "</script><b>x"
    records.write_rank(tmp_path, 0, 1, events, [], host="<i>host")
    write_outputs(tmp_path)
    text = (tmp_path / "timeline.html").read_text()
    assert "</script><b>" not in text and "<i>host" not in text
    assert _data(tmp_path / "timeline.html")["ranks"][0]["host"] == "<i>host"


# What a user does with the page, and what it then shows, as JSON in the document.
_PROBE = """<pre id="probe"></pre><script>
(() => {
  const part = id => document.getElementById(id), tracks = part("tracks"), box = tracks.getBoundingClientRect(), seen = {tips: []};
  const shown = () => part("window").textContent;
  const hover = canvas => {
    const found = new Set(), area = canvas.getBoundingClientRect();
    for (let y = 2; y < area.height; y += 8) {
      for (let x = 1; x < area.width; x += 6) {
        canvas.dispatchEvent(new PointerEvent("pointermove", {clientX: area.left + x, clientY: area.top + y}));
        if (!part("tip").hidden) found.add(part("tip").textContent);
      }
    }
    return [...found];
  };
  part("whole").click();
  seen.whole = shown();
  part("step").value = "2";
  part("step").dispatchEvent(new Event("change"));
  seen.step = shown();
  seen.tips = hover(tracks);
  seen.memory = hover(part("memory"));
  tracks.dispatchEvent(new WheelEvent("wheel", {deltaY: -400, clientX: box.left + 600, clientY: box.top + 40, cancelable: true}));
  seen.closer = shown();
  part("next").click();
  seen.next = part("step").value;
  document.querySelector(".strip canvas").dispatchEvent(new MouseEvent("mousemove", {clientX: box.left + 140, clientY: 200}));
  seen.strip = part("tip").textContent;
  part("theme").click();
  seen.dark = document.documentElement.classList.contains("dark");
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  seen.overflow = wide;
  part("probe").textContent = JSON.stringify(seen);
})();
</script>"""


def _in_browser(browser, page, folder):
    """(the document after its scripts ran, what they complained of)"""
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--window-size=1280,800",
               "--virtual-time-budget=2000", "--enable-logging=stderr", "--dump-dom", page]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


@pytest.fixture(scope="module")
def browser():
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    return found or pytest.skip("no chromium on this machine (apt-get install chromium): the page isn't looked at")


def test_chromium_shows_it(browser, run_folder, tmp_path):
    shown, complaints = _in_browser(browser, (run_folder / "timeline.html").as_uri() + "#theme=dark", tmp_path)
    assert complaints == []
    assert "<title>Unshard timeline: 2 ranks on 1 host</title>" in shown
    assert "Slowest: rank" in shown and shown.count('class="strip"') == 2
    assert shown.count("<td>rank ") == 2                                      # the table is made by the script
    assert shown.count("<option") >= STEPS + 1
    assert re.search(r'<html[^>]*class="dark"', shown)


def test_chromium_can_be_worked_with(browser, run_folder, tmp_path):
    page = tmp_path / "probed.html"
    page.write_text((run_folder / "timeline.html").read_text().replace("</body>", _PROBE + "</body>"))
    shown, complaints = _in_browser(browser, page.as_uri(), tmp_path / "profile")
    assert complaints == []
    seen = json.loads(html.unescape(re.search(r'<pre id="probe">(.*?)</pre>', shown)[1]))
    assert len({seen["whole"], seen["step"], seen["closer"]}) == 3
    assert seen["next"] == "3" and seen["dark"] and seen["overflow"] == 0
    tips = "\n".join(seen["tips"])
    # (What takes less than a pixel isn't under any of the points that were hovered over: not each of a step's short parts is among them.)
    assert {"forward (compute)", "backward (compute)"} <= {t.split(":")[0] for t in seen["tips"]} and "(reduce)" in tips
    assert "0.weight" in tips and " kB" in tips and "rank 1, at" in tips
    assert any(re.match(r"model state at [^\n]+\nrank 0: [\d.]+ kB\nrank 1: [\d.]+ kB", text) for text in seen["memory"])
    assert re.match(r"rank 0, step \d+: [\d.]+ ms\n[\d.]+ ms compute", seen["strip"])
