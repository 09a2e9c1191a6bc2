"""Processes that the ranks started and left behind. As their subreaper the launcher inherits them, and can end them."""
import ctypes
import os
import signal

PR_SET_CHILD_SUBREAPER = 36


def children():
    found = set()
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
                found.update(map(int, file.read().split()))
        except OSError:
            pass
    return found


def adopt():
    """From now on, orphaned descendants become children of this process. Returns the children it has already."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return children()


def end_all_but(before):
    """SIGKILL every child that is not in `before`, and theirs as they fall to us."""
    while left := children() - before:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass
