"""What the launcher's tests share: an empty place, and a launcher started in it."""
import json
import os
import pathlib
import socket
import subprocess
import sys
import textwrap

from unshard.launcher.node_plan import make_node_plan
from unshard.launcher.options import build_parser
from unshard.launcher.plan import make_plan

PYTHON_DIR = str(pathlib.Path(__file__).resolve().parents[2] / "python")
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR",
                  "MASTER_PORT", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "DS_ENV_FILE")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def command(*arguments):
    return [sys.executable, "-m", "unshard.launcher", f"--master_port={free_port()}", *arguments]


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([PYTHON_DIR, os.environ.get("PYTHONPATH", "")])}


def launch(*arguments, port=True):
    words = command(*arguments)
    if not port:
        words = [word for word in words if not word.startswith("--master_port")]
    return subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=60)


def script(folder, text, name="train.py"):
    (folder / name).write_text(textwrap.dedent(text))
    return name


def plan_of(*arguments, devices=0):
    """What this machine's ranks would get."""
    plan = make_plan(build_parser("test").parse_args(arguments), lambda: devices)
    assert plan.way == "here"
    return make_node_plan(plan.order(0, "test"), lambda: devices)


WRITE_WHAT_I_GOT = """
    import json, os, sys
    with open(f"got{os.environ['RANK']}.json", "w") as file:
        json.dump({"env": dict(os.environ), "argv": sys.argv[1:], "cores": sorted(os.sched_getaffinity(0))}, file)
"""


def got(folder, rank):
    return json.loads((folder / f"got{rank}.json").read_text())


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
