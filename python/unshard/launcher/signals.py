"""The signals that ask a launcher to end its job."""
import contextlib
import signal

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@contextlib.contextmanager
def signals_to(handler):
    """Within this, they call handler(number, frame)."""
    before = {number: signal.signal(number, handler) for number in ENDING}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
