"""Memory of this process as a fair share of what it shares: PSS, sampled."""
import threading
import time


def pss_mb():
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/smaps_rollup has no Pss line")


class PeakPss:
    """`with PeakPss() as peak: ...; peak.mb`. Sampling walks the page tables, so keep it out of timed steps."""

    def __init__(self, every_s=0.02):
        self.mb, self._every_s, self._stop = 0.0, every_s, threading.Event()

    def __enter__(self):
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _sample(self):
        while not self._stop.is_set():
            self.mb = max(self.mb, pss_mb())
            time.sleep(self._every_s)
