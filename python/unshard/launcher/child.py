"""Becomes one rank: tie its life to the launcher's, then replace this process by the rank's command.

Started as `python -I -S child.py PLAN` with a bare interpreter; PLAN is a JSON file of the launcher (a memfd). The command travels in it,
not on the agent's command line, because the agent would substitute $-expressions in arguments.
"""
import ctypes
import json
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with(launcher):
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != launcher:     # it died before the line above
        sys.exit(1)


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        plan = json.load(file)
    die_with(plan["launcher"])
    rank = int(os.environ["LOCAL_RANK"])
    if plan["log_dir"]:
        path = os.path.join(plan["log_dir"], f"rank{plan['first_rank'] + rank}.log")
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
    if plan["cores"]:
        os.sched_setaffinity(0, plan["cores"][rank])
    os.environ.update(plan["environment"])
    with open(plan["started"], "w", encoding="ascii") as started:
        started.write(f"{rank} {os.getpid()}\n")
    for number in (signal.SIGPIPE, signal.SIGXFSZ):         # which Python ignores; a program that isn't Python's may rely on them
        signal.signal(number, signal.SIG_DFL)
    argv = plan["argv"][rank]
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"can't start '{argv[0]}': {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
