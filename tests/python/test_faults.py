"""Ranks are killed, stopped and delayed at random places of start, forward, backward, step and save (faults.py): the others end soon, with
words that name the rank, or, where it comes back in time, nothing is lost."""
import concurrent.futures
import os
import pathlib
import re
import signal
import threading
import time

import faults
import pytest
import torch
from pool import Pool, Zygote

UNSHARED = {"UNSHARD_SHARE_MEMORY": "off"}
PLACEMENTS = {"one_host": (["left"] * 2, {}), "one_host_of_3": (["left"] * 3, {}), "two_hosts": (["left", "right"], {}),
              "pairs": (["left", "left", "right", "right"], {}), "uneven": (["left", "left", "right"], {}),
              "unshared": (["left"] * 3, UNSHARED)}
SEEDS = 24 * max(1, int(os.environ.get("UNSHARD_SOAK", "1")))
FIRST_SEED = int(os.environ.get("UNSHARD_SEED", "1"))
AT_ONCE = 3                     # most of the time of most of them is a wait
KILL_S = 10                     # from a death to the others' end, whatever the time-out
SLACK_S = 3                     # after the time-out: the search for who is missing, exits; two cores are shared by ten processes

# How the rank is named as the one at fault, not just as one of those that wait. Rank 0 serves the store; before it does, it hasn't come.
BLAMED = {"kill": r"rank {v}( \(pid \d+\))? (is gone|can't be watched: it is gone|hasn't come|can't be reached)|"
                  r"rank {v}, which serves [^;]*has ended",
          "stop": r"rank {v}( \(pid \d+\))? (is stopped|gives no sign of life|waits for nobody|hasn't come)|"
                  r"rank {v}, which serves [^;]*is stopped"}


class Watch:
    """Sees in what state the victim is: when it stopped, and continues it in time if it should be."""

    def __init__(self, pid, continue_after):
        self.pid, self.continue_after, self.stopped_at, self._end = pid, continue_after, None, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self):
        while not self._end.wait(0.01):
            try:
                state = pathlib.Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            except (FileNotFoundError, ProcessLookupError):
                return
            if state == "T" and self.stopped_at is None:
                self.stopped_at = time.monotonic()
            if state == "T" and self.continue_after and time.monotonic() - self.stopped_at > self.continue_after:
                os.kill(self.pid, signal.SIGCONT)

    def close(self):
        self._end.set()
        self._thread.join()


def play(zygote, scenario, folder):
    """What is wrong with how it ended, or None."""
    hosts, env = PLACEMENTS[scenario["placement"]]
    victim, kind = scenario["victim"], scenario["kind"]
    with Pool(zygote, hosts, env) as pool:
        begin = time.monotonic()
        watch = Watch(pool.pids[victim], faults.PAUSE_S if kind == "pause" else None)
        outcomes = pool.outcomes(faults.run, scenario, str(folder), limit=4 * faults.TIMEOUT_S + 20,
                                 leave_out=[victim] if kind == "stop" else [])
        watch.close()
    if kind in ("pause", "delay"):
        return recovered(outcomes, len(hosts))
    if kind == "kill" and outcomes[victim].code != -signal.SIGKILL:
        return f"the victim ended with {outcomes[victim].code}: {outcomes[victim].output[-1500:]}"
    if kind == "stop" and watch.stopped_at is None:
        return f"rank {victim} never stopped: {outcomes[victim].output[-1500:]}"
    others = [o for o in outcomes if o.rank != victim]
    if kind == "kill" and all(o.code == 0 for o in others):
        return recovered(others, len(hosts))        # right values: it was struck when nobody needed it any more
    latest = outcomes[victim].seconds + KILL_S if kind == "kill" else watch.stopped_at - begin + faults.TIMEOUT_S + SLACK_S
    return diagnosed(others, latest, BLAMED[kind].replace("{v}", str(victim)),
                     "CommError" if scenario["phase"] in ("meet", "start") else "Error")


def recovered(outcomes, world):
    for o in outcomes:
        if o.code != 0:
            return f"rank {o.rank} ended with {o.code} though all came back in time: {o.output[-2500:]}"
        for i, (got, want) in enumerate(zip(o.value, faults.expected(world))):
            if not torch.allclose(torch.tensor(got), want, rtol=1e-4, atol=1e-5):
                return f"rank {o.rank}: parameter {i} is off by {(torch.tensor(got) - want).abs().max().item():.3g}"
    return None


def diagnosed(survivors, latest, blamed, kind):
    for o in survivors:
        if o.code != 1:
            return f"rank {o.rank} ended with {o.code} instead of an error: {o.output[-2500:]}"
        if o.seconds > latest:
            return f"rank {o.rank} ended after {o.seconds:.1f} s, {o.seconds - latest:.1f} s too late: {o.output[-2500:]}"
        error = o.output.split("Traceback")[-1]
        if not re.search(blamed, error):
            return f"rank {o.rank} doesn't blame the rank: {error.strip()[-2500:]}"
        if f"{kind}: [" not in error or "CheckpointError" in error:
            return f"rank {o.rank} has an error of another kind: {error.strip()[-2500:]}"
    return None


@pytest.fixture(scope="module")
def zygote():
    with Zygote() as zygote:
        yield zygote


def test_every_fault_ends_in_recovery_or_in_words_that_name_the_rank(zygote, tmp_path):
    scenarios = [faults.scenario(seed, PLACEMENTS) for seed in range(FIRST_SEED, FIRST_SEED + SEEDS)]
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as executor:
        reasons = list(executor.map(lambda s: play(zygote, s, tmp_path / str(s["seed"])), scenarios))
    bad = [f"{scenario}\n    {reason}" for scenario, reason in zip(scenarios, reasons) if reason]
    assert not bad, f"{len(bad)} of {len(scenarios)}:\n" + "\n\n".join(bad)


def test_the_sample_has_every_fault_in_every_phase():
    drawn = {(s["kind"], s["phase"]) for s in (faults.scenario(seed, PLACEMENTS) for seed in range(1, 201))}
    assert drawn == {(kind, phase) for kind in faults.KINDS for phase in faults.PHASES}
