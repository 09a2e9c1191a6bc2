"""The signals that ask a launcher to end its job."""
import contextlib
import ctypes
import signal

PR_SET_PDEATHSIG = 1
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def terminate_with_parent():
    """From now on the end of the parent process is a SIGTERM for this one."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@contextlib.contextmanager
def signals_to(handler):
    """Within this, they call handler(number, frame)."""
    before = {number: signal.signal(number, handler) for number in ENDING}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
