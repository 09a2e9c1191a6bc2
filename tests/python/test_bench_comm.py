"""`unshard bench comm`: factors, exact values, both transports, and that a wrong value is seen."""
import contextlib
import io
import json
import os
import subprocess
import sys

import pytest
import torch
from hosts import Hosts
from ranks import run_ranks
from unshard.bench_comm import main, table
from unshard.bench_comm.measure import Row, count_of
from unshard.bench_comm.operations import OPERATIONS, AllReduce, Values
from unshard.bench_comm.options import parse, parse_size, sizes
from unshard.bench_comm.world import busy, hosts_of

NAMES = list(OPERATIONS)


# ---- formulas

@pytest.mark.parametrize("name, part", [("all_reduce", lambda n: 2 * (n - 1) / n), ("reduce_scatter", lambda n: (n - 1) / n),
                                        ("all_gather", lambda n: (n - 1) / n), ("all_to_all", lambda n: (n - 1) / n),
                                        ("broadcast", lambda n: 1), ("send_recv", lambda n: 1)])
def test_bus_factors(name, part):
    for world in (2, 3, 8):
        assert OPERATIONS[name]().bus_factor(world) == part(world)


def test_sizes_and_counts():
    assert parse_size("1K") == 1024 and parse_size("64M") == 64 << 20 and parse_size("2GiB") == 2 << 30 and parse_size("5") == 5
    assert sizes(parse(["--min=1K", "--max=64K", "--factor=4"], "test")) == [1 << 10, 4 << 10, 16 << 10, 64 << 10]
    assert sizes(parse(["--min=3", "--max=3", "--factor=1"], "test")) == [3]
    gather, reduce = OPERATIONS["all_gather"](), OPERATIONS["all_reduce"]()
    assert (count_of(gather, 1024, 3, 4), count_of(reduce, 1024, 3, 4), count_of(gather, 1, 3, 4)) == (255, 256, 3)


@pytest.mark.parametrize("words", [["--min=2K", "--max=1K"], ["--factor=1"], ["--ops=all_reduce,none"], ["--min=0"], ["--iters=no"],
                                   ["--ranks=0"], ["--dtype=float64"], ["--max=99999999999999999999"], ["--max=99999999999G"]])
def test_bad_requests_are_refused(words):
    with pytest.raises(SystemExit) as refused:
        parse(words, "test")
    assert refused.value.code == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world", [2, 3, 8, 100, 256])
def test_values_and_their_sums_are_exact(dtype, world):
    values = Values(world, dtype, sums=True)
    given = [values.of(rank, 300, start=7) for rank in range(world)]
    whole = torch.stack(given).to(torch.float64)
    assert torch.equal(whole, whole.round()) and whole.max() > 0
    assert torch.equal(values.sum(300, start=7).to(torch.float64), whole.sum(0))
    running = given[0].clone()
    for other in given[1:]:
        running += other                                      # rounds after each addition where it must
    assert torch.equal(running, values.sum(300, start=7))
    assert torch.equal(values.of(1, 300)[7:], values.of(1, 293, start=7))


def test_sums_that_cannot_be_exact_are_refused():
    with pytest.raises(ValueError, match="use float32"):
        Values(257, torch.bfloat16, sums=True)


def test_ranks_are_grouped_by_host_and_the_average_is_of_all_rows():
    cards = [{"host": "a", "identity": "1"}, {"host": "b", "identity": "2"}, {"host": "a", "identity": "1"}]
    assert [(host["host"], host["ranks"]) for host in hosts_of(cards)] == [("a", [0, 2]), ("b", [1])]
    assert table.ranges([0, 1, 2, 5]) == "0-2, 5"
    rows = [Row("all_gather", 8, 2, "float32", 5, 1.0, 2.0, busbw, wrong) for busbw, wrong in ((1.0, 0), (2.0, 3))]
    assert table.last_line(rows) == "# average busbw 1.500 GB/s; out of bounds: 3 FAILED"
    assert table.last_line(rows[:1]).endswith("0 OK")


@pytest.mark.parametrize("load, cores, ranks, said", [(0.4, 2, 2, False), (0.6, 2, 2, True), (3.0, 8, 4, False), (5.0, 8, 4, True)])
def test_a_busy_host_is_named(load, cores, ranks, said):
    host = {"host": "a", "ranks": list(range(ranks)), "busy": busy({"card": {"load": load, "cores": cores}, "ranks": list(range(ranks))})}
    world = {"ranks": ranks, "hosts": [host], "device": "CPU", "transport": "", "versions": {}, "system": "", "different_versions": {}}
    assert any("host a is busy" in line for line in table.head(world)) is said


# ---- two ranks

class OneWrong(AllReduce):
    """What a broken transport would do: one element, on one rank."""

    def run(self, comm, output, input):
        super().run(comm, output, input)
        if comm.rank == 1:
            output[3] += 1


class Idle(AllReduce):
    """Leaves what it was given."""

    def run(self, comm, output, input):
        pass


def on_two_ranks(rank, world):
    """{backend: figures}, and what the command returns when an operation is broken."""
    from unshard import bench_comm, distributed
    from unshard.bench_comm.command import bench, communicator
    from unshard.bench_comm.measure import measure

    distributed.init_distributed()
    told = {}
    for backend in ("shared", "c10d"):
        comm, lines, rows = communicator(backend, torch.device("cpu")), [], []
        for dtype in (torch.float32, torch.bfloat16):
            rows += bench(comm, NAMES, [1024, 100_000], dtype, "cpu", 3, lines.append)
        wrong, idle = (measure(comm, kind(), 4096, torch.float32, "cpu", 3).wrong for kind in (OneWrong, Idle))
        told[backend] = {"shares": comm.shares_memory, "rows": [vars(row) for row in rows], "lines": len(lines), "wrong": wrong,
                         "idle": idle}
    OPERATIONS["all_reduce"] = OneWrong
    told["code"] = bench_comm.main(["--ops=all_reduce", "--max=1K", "--iters=2", "--device=cpu"])
    return told


def test_all_operations_are_right_on_both_transports_and_a_wrong_value_is_seen():
    first, second = run_ranks(2, on_two_ranks, limit=60)
    for backend in ("shared", "c10d"):
        told = first[backend]
        assert second[backend]["rows"] == told["rows"]        # agreed
        assert told["shares"] is (backend == "shared")
        assert len(told["rows"]) == told["lines"] == len(NAMES) * 4
        for row in told["rows"]:
            check_row(row)
        assert told["wrong"] == second[backend]["wrong"] == 2          # one element, in both checked calls
        assert told["idle"] > 2 * 1000                        # two ranks of 1024 elements, before and after
    assert (first["code"], second["code"]) == (1, 1)          # of the command, with an operation that is wrong on rank 1


def check_row(row):
    assert row["wrong"] == 0, row
    assert row["iterations"] == 3 and row["time_us"] > 0
    assert row["bytes"] == row["count"] * (4 if row["dtype"] == "float32" else 2)
    assert row["algbw_GBps"] == pytest.approx(row["bytes"] / row["time_us"] / 1e3)
    assert row["busbw_GBps"] == pytest.approx(row["algbw_GBps"] * OPERATIONS[row["operation"]]().bus_factor(2))


def on_two_hosts(rank, world):
    from unshard import bench_comm

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = bench_comm.main(["--ops=all_gather,all_reduce", "--min=64K", "--max=64K", "--iters=3"])
    return {"code": code, "said": said.getvalue().splitlines()}


def test_hosts_and_the_link_between_them_are_named():
    with Hosts(2, mbit=1000, ssh=False) as hosts:
        first, second = hosts.run_ranks([1, 2], on_two_hosts, limit=60)[:2]
    assert (first["code"], second["code"], second["said"]) == (0, 0, [])
    assert "3 ranks on 2 hosts" in first["said"][0]
    assert "Gloo over eth0 (10.77.0.1) and eth0 (10.77.0.2)" in first["said"][0]
    assert [line for line in first["said"] if line.startswith("# host")] == ["# host worker-1: rank 0", "# host worker-2: ranks 1-2"]
    assert first["said"][-1].endswith("out of bounds: 0 OK")


def bench_comm(*words):
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "UNSHARD_SHARE_MEMORY")}
    return subprocess.run([sys.executable, "-m", "unshard.cli", "bench", "comm", *words], env={**env, "OMP_NUM_THREADS": "1"},
                          capture_output=True, text=True, timeout=60)


def test_the_command_starts_its_ranks(tmp_path):
    done = bench_comm("--ranks=2", "--device=cpu", "--ops=all_gather,send_recv", "--max=4K", f"--json={tmp_path / 'out.json'}")
    assert done.returncode == 0, done.stderr + done.stdout
    lines = done.stdout.splitlines()
    assert "2 ranks on 1 host" in lines[0] and "transport: shared memory" in lines[0]
    assert [line.split()[:2] for line in lines if line[0] != "#"] == [[name, str(size)] for name in ("all_gather", "send_recv")
                                                                      for size in (1024, 4096)]
    assert lines[-1].endswith("out of bounds: 0 OK")
    told = json.loads((tmp_path / "out.json").read_text())
    assert (told["ranks"], told["wrong"], len(told["rows"])) == (2, 0, 4)
    assert told["versions"]["torch"] == torch.__version__ and told["hosts"][0]["ranks"] == [0, 1]


def test_sizes_that_do_not_fit_and_files_that_cannot_be_written_say_so(capsys):
    assert main(["--ranks=2", "--device=cpu", "--max=900000G"]) == 2
    said = capsys.readouterr().err
    assert "[bench.comm] --max=966367641600000: 3 tensors of" in said and "give a smaller --max" in said
    done = bench_comm("--ranks=1", "--device=cpu", "--ops=all_reduce", "--max=1K", "--json=/dev/full")
    assert done.returncode == 2
    assert done.stderr.startswith("unshard bench comm: error: [bench.comm] --json=/dev/full can't be written: No space left on device\n")


def test_a_reader_that_goes_ends_the_measurement_quietly():
    words = [sys.executable, "-m", "unshard.cli", "bench", "comm", "--ranks=2", "--device=cpu", "--max=4K"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(30) == 141
    process.stderr.close()


def test_a_request_that_cannot_be_met_says_why(monkeypatch, capsys):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert main(["--ranks=3"]) == 2
    assert "the launcher started 2" in capsys.readouterr().err
