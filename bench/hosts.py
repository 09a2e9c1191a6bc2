"""The question "hosts": training across two hosts, which are network namespaces of this machine joined by a link of a given speed, and the
time from the launcher to the first step on them. Makes the plain data for bench/results.json, its targets and its tables.

The model is smaller than the one-host question's (5.3M parameters: 4 layers of 256, vocabulary 4096), so that four ranks on two cores and
a link of 1 Gbit/s leave steps of less than a second; bytes and arithmetic are in about the same proportion. At 1 Gbit/s every packet takes
1 ms, by a relay in user space that costs a part of a core; at 10 Gbit/s it takes what the kernel needs, for the relay couldn't carry that.
"""
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from ranks import BENCH, BenchError, run

OURS = sys.executable
MODEL = {"layers": 4, "width": 256, "heads": 4, "vocab": 4096}
LINKS = {"1 Gbit/s, 1 ms": (1000, 1), "10 Gbit/s": (10000, 0)}
MODES = ["solo", "ddp", "fsdp2", "unshard1", "unshard2", "unshard3"]
BATCH, STEPS = 2, 6
LOSS_TOLERANCE = 2e-4
FIRST_STEP_LIMIT_S = 90


def namespaces():
    """The module that makes hosts for tests. By its path: it has the name of this one."""
    spec = importlib.util.spec_from_file_location("namespaces", BENCH.parent / "tests" / "python" / "hosts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_on(hosts, link, per_host, python, mode, steps):
    """One mode's training step on two hosts."""
    def start(rank, command, env, **options):
        env = dict(env, LOCAL_RANK=str(rank % per_host), LOCAL_WORLD_SIZE=str(per_host), LOCAL_SIZE=str(per_host),
                   MASTER_ADDR=hosts.address(0), GLOO_SOCKET_IFNAME=link)
        return hosts.popen(rank // per_host, command, env=env, **options)

    options = {"model": MODEL, "link": link, "memory": False}
    return run(python, "train_step.py", mode, "fp32", steps, BATCH, json.dumps(options), ranks=2 * per_host, start=start)


def question(peers, failures, rounds, steps, say, only=None):
    """{"training": {"1 Gbit/s, 1 ms, 1 rank a host": {mode: medians}}, "first_step_s": {name: seconds}}; modes take turns."""
    module = namespaces()
    if reason := module.missing():
        failures.append(f"hosts: {reason}")
        return {}
    result = {"training": {}, "model": MODEL}
    modes = [mode for mode in MODES + (["deepspeed3"] if peers else []) if not only or mode in only]
    for link, (mbit, delay_ms) in LINKS.items():
        with module.Hosts(2, mbit=mbit, delay_ms=delay_ms, ssh=False) as hosts:
            for per_host in (1, 2):
                where = f"{link}, {per_host} rank{'s' * (per_host > 1)} a host"
                result["training"][where] = one_place(hosts, module.LINK, per_host, peers, modes, failures, rounds, steps, where, say)
    with module.Hosts(2, mbit=10000) as hosts:
        result["first_step_s"] = first_steps(hosts, peers, failures, rounds, say)
    return result


def one_place(hosts, link, per_host, peers, modes, failures, rounds, steps, where, say):
    runs = {mode: [] for mode in modes}
    for round_number in range(rounds):
        for mode in modes:
            try:
                one = run_on(hosts, link, per_host, peers if mode.startswith("deepspeed") else OURS, mode, steps)
            except BenchError as error:
                failures.append(f"{where}: {error}")
                say(f"  FAILED {error}")
                continue
            runs[mode].append(one)
            say(f"  {where}, round {round_number + 1}: {mode:10} {one['step_ms']:6.0f} ms  {one['link_mb']:6.1f} MB a host"
                + (f"  {one['exposed_ms']:5.1f} ms exposed" if one["exposed_ms"] is not None else ""))
    medians = {mode: {**{key: _median(of_mode, key) for key in ("step_ms", "link_mb", "exposed_ms")},
                      "step_ms_all": [one["step_ms"] for one in of_mode], "losses": of_mode[0]["losses"]}
               for mode, of_mode in runs.items() if of_mode}
    reference = medians.get("ddp")
    for mode, row in medians.items():
        worst = max(abs(a - b) for a, b in zip(row["losses"], reference["losses"])) if reference and mode != "solo" else 0
        if worst > LOSS_TOLERANCE:
            failures.append(f"{where}, {mode}: its losses differ from DDP's by up to {worst:.2g}")
    return medians


def _median(runs, key):
    values = [one[key] for one in runs if one[key] is not None]
    return statistics.median(values) if values else None


# ---- from the launcher to the first step --------------------------------------------------------------------------------------------
def first_steps(hosts, peers, failures, rounds, say):
    """Seconds, medians over the rounds; the launchers take turns. DeepSpeed's goes over pdsh, its default."""
    launchers = {"unshard": ([OURS, "-m", "unshard.launcher"], "unshard")}
    if peers and shutil.which("pdsh"):
        launchers["deepspeed"] = ([peers, "-m", "deepspeed.launcher.runner"], "deepspeed")
    seconds = {name: [] for name in launchers}
    for _ in range(rounds):
        for name, (launcher, module) in launchers.items():
            try:
                seconds[name].append(first_step(hosts, launcher, module))
                say(f"  launcher to first step: {name:10} {seconds[name][-1]:5.1f} s")
            except BenchError as error:
                failures.append(str(error))
                say(f"  FAILED {error}")
    return {name: statistics.median(times) for name, times in seconds.items() if times}


def first_step(hosts, launcher, module):
    with tempfile.TemporaryDirectory(prefix="unshard_bench_") as folder:
        hostfile = hosts.hostfile(pathlib.Path(folder) / "hostfile", 1)
        (pathlib.Path(folder) / ".deepspeed_env").write_text("DS_ACCELERATOR=cpu\nGLOO_SOCKET_IFNAME=eth0\nOMP_NUM_THREADS=1\n")
        env = dict(os.environ, DS_ACCELERATOR="cpu", GLOO_SOCKET_IFNAME="eth0", OMP_NUM_THREADS="1",
                   PATH=os.pathsep.join([str(pathlib.Path(launcher[0]).parent), os.environ.get("PATH", "")]))
        command = [*launcher, f"--hostfile={hostfile}", f"--master_addr={hosts.address(0)}", str(BENCH / "first_step.py"), module]
        begin = time.monotonic()
        process = hosts.popen(0, command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True)
        timer = _kill_after(process, FIRST_STEP_LIMIT_S)
        seconds, said = None, []
        for line in process.stdout:
            said.append(line)
            if "FIRST STEP" in line and seconds is None:
                seconds = time.monotonic() - begin
        timer.cancel()
        if process.wait() or seconds is None:
            raise BenchError(f"{module}: the launcher ended with {process.returncode}\n" + "".join(said[-15:]))
        return seconds


def _kill_after(process, seconds):
    def kill():
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(seconds, kill)
    timer.start()
    return timer


# ---- what it is worth -----------------------------------------------------------------------------------------------------------------
def targets(hosts, target, name_of):
    """Rows as report.targets(); `target`, `name_of`: report's."""
    rows = []
    for where, modes in hosts.get("training", {}).items():
        several = "2 ranks" in where

        def speed(mode, peer, wanted, modes=modes, where=where):
            if mode in modes and peer in modes:
                ratio = modes[peer]["step_ms"] / modes[mode]["step_ms"]
                rows.append(target(f"{where}: {name_of(mode)}, speed over {name_of(peer)}", ratio, wanted, False))

        speed("unshard3", "fsdp2", 1.8 if several else 1.3)
        speed("unshard3", "deepspeed3", 1.8 if several else 1.5)
        speed("unshard1", "ddp", 1)
        speed("unshard2", "ddp", 1)
        ours = modes.get("unshard3", {})
        if where.startswith("10 Gbit/s") and ours.get("exposed_ms") is not None:          # where the link can hide the gathers
            rows.append(target(f"{where}: share of a ZeRO-3 step that waits for gathers", ours["exposed_ms"] / ours["step_ms"], 0.1, True))
    seconds = hosts.get("first_step_s", {})
    if "unshard" in seconds and "deepspeed" in seconds:
        share = seconds["unshard"] / seconds["deepspeed"]
        rows.append(target("two hosts, from the launcher to the first step, time of DeepSpeed's", share, 0.5, True))
    return rows


def tables(hosts, table, name_of):
    """Parts of the document; `table`, `name_of`: report's."""
    if not hosts.get("training"):
        return []
    rows = []
    for where, modes in hosts["training"].items():
        for mode, row in modes.items():
            exposed = f"{row['exposed_ms']:.1f}" if row["exposed_ms"] is not None else ""
            rows.append([where, name_of(mode), f"{row['step_ms']:.0f}", f"{row['link_mb']:.1f}", exposed])
    parts = ["### Two hosts", table(["", "", "fp32 ms a step", "MB a host sends a step", "ms waited for gathers"], rows)]
    if hosts.get("first_step_s"):
        parts.append(table(["from the launcher to the first step", "s"], [[name, f"{s:.1f}"] for name, s in hosts["first_step_s"].items()]))
    return parts
