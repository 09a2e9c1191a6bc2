"""What pdsh, srun or mpirun starts on each host: `python -m unshard.launcher.tool_task`. Which host this is says the tool; the plan is in
the environment, or a line of standard input."""
import argparse
import os
import signal
import sys
import threading
from types import SimpleNamespace

from unshard.launcher.command import carry_out
from unshard.launcher.devices import device_count
from unshard.launcher.signals import terminate_with_parent
from unshard.launcher.tools import TASK_VARIABLE, decode
from unshard.streams import complete

NUMBERS = ("OMPI_COMM_WORLD_RANK", "SLURM_NODEID", "PMI_RANK")


def main():
    parser = argparse.ArgumentParser(prog="python -m unshard.launcher.tool_task", description=__doc__)
    parser.add_argument("--node_rank", type=int, default=-1)
    parser.add_argument("--lease", action="store_true", help="the plan comes over standard input, whose end is the end of the launcher")
    options = parser.parse_args()
    complete()
    terminate_with_parent()                      # the tool's process here: sshd, slurmstepd, orted
    word = read_line() if options.lease else os.environ.pop(TASK_VARIABLE, "")
    if not word:
        sys.exit("unshard run: error: the plan of the job hasn't come here; is the tool kept from handing on its environment?")
    if options.lease:
        threading.Thread(target=end_with_input, name="unshard-lease", daemon=True).start()
    plan = decode(word)
    plan.node_rank = options.node_rank if options.node_rank >= 0 else own_number(plan)
    os.chdir(plan.task["cwd"])
    return carry_out(plan, SimpleNamespace(connect_timeout=60, no_ssh_check=False, quiet=False, log_level=plan.task["log_level"],
                                           save_pid=False), device_count, "unshard run")


def read_line():
    """The one line that comes, or "" where the input ends before."""
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(0, 64 << 10)
        if not data:
            return ""
        line += data
    return line.decode().strip()


def end_with_input():
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def own_number(plan):
    names = [share.host for share in plan.shares]
    name = os.environ.get("SLURMD_NODENAME")
    if name in names:                            # srun numbers hosts in an order of its own
        return names.index(name)
    for variable in NUMBERS:
        if variable in os.environ:
            return int(os.environ[variable])
    sys.exit(f"unshard run: error: which of the hosts is this? None of {', '.join(NUMBERS)} is set; give --node_rank")


if __name__ == "__main__":
    sys.exit(main())
