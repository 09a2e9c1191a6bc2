"""Processes that the ranks started and left behind. As their subreaper the launcher inherits them, and can end them."""
import ctypes
import os
import signal
import time

from unshard.streams import complain

PR_SET_CHILD_SUBREAPER = 36
LIMIT_S = 10.0           # a process with much memory on a device takes seconds to end


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


def end_all_but(before, limit_s=LIMIT_S):
    """SIGKILL every child that is not in `before`, and theirs as they fall to us. Returns those that didn't end of it, and says so."""
    end = time.monotonic() + limit_s
    while left := children() - before:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
            except (ProcessLookupError, ChildProcessError):
                pass
        if time.monotonic() > end:
            pids = ", ".join(map(str, sorted(left)))
            complain(f"[unshard run] warning: pid {pids} is still there {limit_s:g} s after SIGKILL, and is left (a device or file system "
                     "may hang)")
            return left
        time.sleep(0.002)
    return set()
