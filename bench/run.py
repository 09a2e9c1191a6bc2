"""`make bench`: speed and memory of Unshard beside its peers, in one run on one machine.

    python bench/run.py [--only training,update,collectives,startup,touch,hosts,checkpoint,inference,serving] [--rounds N] [--quick]
                        [--no-document]

UNSHARD_PEERS_PYTHON names the interpreter of an environment with DeepSpeed; without it DeepSpeed is left out, and that is said. DeepSpeed's
first run there compiles its operators, which takes minutes; the bench does that once before it measures.
"""
import argparse
import datetime
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys

import checkpoints
import hosts
import inference
import questions
import report
import servers
from ranks import BenchError, run

BENCH = pathlib.Path(__file__).resolve().parent
RESULTS = BENCH / "results.json"
ALL = ["training", "update", "collectives", "startup", "touch", "hosts", "checkpoint", "inference", "serving"]


def find_peers():
    """(interpreter or None, what is left out)"""
    python = os.environ.get("UNSHARD_PEERS_PYTHON")
    if python and subprocess.run([python, "-c", "import deepspeed"], capture_output=True).returncode == 0:
        return python, []
    return None, ["DeepSpeed (UNSHARD_PEERS_PYTHON names no Python that has it)"]


def warm_up(peers, asked):
    print("building DeepSpeed's operators where they aren't yet (minutes)", flush=True)
    for arguments in ([["train_step.py", "deepspeed3", "fp32", 1, 1]] if "training" in asked or "hosts" in asked else []) + \
                     ([["update.py", "deepspeed_cpu_adam", 1]] if "update" in asked else []):
        try:
            run(peers, *arguments, ranks=1 if arguments[0] == "update.py" else 2, limit=1200)
        except BenchError as error:
            print(f"  {error}")


def machine():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), platform.machine())
    return f"{os.cpu_count()} cores of {model}"


def commit():
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=BENCH, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def earlier():
    """What other questions found in an earlier run: a run of some questions leaves the answers to the others."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def measure(options, peers, failures):
    asked = options.only.split(",") if options.only else ALL
    results = {}
    for what in asked:
        print(f"\n== {what}", flush=True)
        if what == "training":
            results[what] = questions.training(peers, failures, options.rounds, options.steps, 2, options.dtypes.split(","),
                                               options.modes.split(",") if options.modes else None)
        elif what == "update":
            results[what] = questions.update(peers, failures, options.millions, options.rounds)
        elif what == "collectives":
            results[what] = questions.collectives(peers, failures)
        elif what == "startup":
            results[what] = questions.startup(peers, failures, options.rounds)
        elif what == "touch":
            results[what] = questions.touch(failures)
        elif what == "hosts":
            results[what] = hosts.question(peers, failures, min(options.rounds, 2), min(options.steps, hosts.STEPS), questions.say,
                                           options.modes.split(",") if options.modes else None)
        elif what == "checkpoint":
            results[what] = checkpoints.question(peers, failures, options.rounds, 4 if options.quick else 60, questions.say)
        elif what == "inference":
            results[what] = inference.question(peers, failures, options.rounds, questions.say)
        elif what == "serving":
            results[what] = servers.question(peers, failures, min(options.rounds, 3), questions.say)
        else:
            raise SystemExit(f"bench: there is no question '{what}'; there is {', '.join(ALL)}")
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help=f"of {','.join(ALL)}")
    parser.add_argument("--modes", default="", help=f"of the training step: {','.join(questions.TRAINING_MODES)},deepspeed2,deepspeed3")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="timed steps a round")
    parser.add_argument("--millions", type=float, default=50, help="elements of the update, in millions")
    parser.add_argument("--quick", action="store_true", help="one round of three steps: does it run at all?")
    parser.add_argument("--no-document", action="store_true", help="leave docs/performance.md as it is")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.millions = 1, 3, 8
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))        # so that what was started is ended
    import torch

    peers, left_out = find_peers()
    if peers:
        warm_up(peers, options.only or ALL)
    failures = []
    when = {"date": datetime.date.today().isoformat(), "machine": machine(), "torch": torch.__version__, "commit": commit(),
            "command": "make bench" + (f" ARGS='{' '.join(sys.argv[1:])}'" if sys.argv[1:] else "")}
    measured = measure(options, peers, failures)
    results = {**(earlier() if options.only else {}), "left_out": left_out, "update_millions": options.millions, **measured,
               "failures": failures}
    results["measured"] = {**results.get("measured", {}), **dict.fromkeys(measured, when)}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print("\n== against the targets")
    for what, value, wanted, met in report.targets(results):
        print(f"  {'met    ' if met else 'NOT MET'} {what}: {value:.3g} (wanted {wanted})")
    for peer in left_out:
        print(f"  left out: {peer}")
    if not options.no_document:
        report.write_document(results)
        print(f"written: {BENCH.name}/results.json, docs/performance.md")
    for failure in failures:
        print(f"FAILED {failure.splitlines()[0]}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
