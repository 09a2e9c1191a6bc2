"""The end of a process that has Gloo groups: their threads must not be in the middle of something when Python goes."""
import atexit
import pathlib
import sys
import time


def group_defaults_without_a_group(dist):
    """Import torch's module whose functions take the group of all ranks as a default argument, before there is one: imported later (by
    the first step of any torch.optim optimizer), it keeps that group and its threads for good, also after destroy_process_group()."""
    if dist.is_available() and not dist.is_initialized():
        import torch.distributed.nn.functional  # noqa: F401


@atexit.register
def wait_for_gloo(limit_s=1.0):
    """Wait, at exit and without the interpreter's lock, until the threads of torch's Gloo groups are idle. (atexit calls the latest first:
    those that import this module let engines and groups go before.)

    Such a thread drops its collective's tensors a moment after the collective has returned, and for Python's tensors it asks for the
    interpreter's lock; while Python ends, that aborts the process. Costs 10 ms where there is a group, nothing otherwise.
    """
    end = time.monotonic() + limit_s
    before = None
    while (threads := _gloo_threads()) and time.monotonic() < end:
        if threads == before and all(state == "S" for state, _ in threads.values()):
            return
        before = threads
        time.sleep(0.005)


def _gloo_threads():
    """{thread id: (its state, how often it was switched)} of the threads that run torch's Gloo collectives."""
    if "torch" not in sys.modules:
        return {}
    threads = {}
    for task in pathlib.Path("/proc/self/task").glob("*"):
        try:
            if (task / "comm").read_text().strip() == "pt_gloo_runloop":
                status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
                switches = int(status["voluntary_ctxt_switches"]) + int(status["nonvoluntary_ctxt_switches"])
                threads[task.name] = (status["State"][:1], switches)
        except OSError:                          # it has ended
            continue
    return threads
