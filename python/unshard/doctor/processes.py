"""Ranks of a running job on this host: found by the thread that every rank's record has, asked by SIGUSR1."""
import contextlib
import ctypes
import os
import re
import signal
import time

_THREAD = "unshard-record"
_JOB = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")


class NoRanks(Exception):
    """There is nobody to ask."""


def ask(pid, wait_s):
    """(files that the ranks wrote now, lines about those that didn't). Raises NoRanks."""
    ranks = ranks_of(pid)
    files = {rank: answer_file(rank) for rank in ranks}
    before = {rank: stamp(file) for rank, file in files.items()}
    for rank in ranks:
        tap(rank)
    end = time.monotonic() + wait_s
    while any(stamp(files[rank]) == before[rank] for rank in ranks) and time.monotonic() < end:
        time.sleep(0.02)
    answered = [files[rank] for rank in ranks if stamp(files[rank]) != before[rank]]
    notes = [silence(rank, wait_s) for rank in ranks if files[rank] not in answered]
    return answered, notes


def clean(files):
    """They were made for this one question."""
    for file in files:
        with contextlib.suppress(OSError):
            os.unlink(file)


def ranks_of(pid):
    """Process ids of the ranks below a launcher, or of the job that a rank belongs to."""
    if not os.path.isdir(f"/proc/{pid}"):
        raise NoRanks(f"there is no process {pid}")
    processes = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    candidates = [one for one in processes if is_rank(one)]
    if pid in candidates:
        job = job_of(pid)
        return sorted(one for one in candidates if one == pid or (any(job) and job_of(one) == job))
    below = [one for one in candidates if pid in ancestors(one)]
    if not below:
        raise NoRanks(f"process {pid} is no rank of an Unshard run, and has started none here (a rank can be asked once it has begun "
                      "unshard.initialize or zero.Init; UNSHARD_RECORD=off forbids it)")
    return sorted(below)


def is_rank(pid):
    """Whether SIGUSR1 is safe to send: others may be ended by it. A forked worker has the handler too, but not the thread."""
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.getuid() and os.getuid() != 0:
            return False
        return record_thread(pid) is not None
    except OSError:
        return False


def record_thread(pid):
    tasks = (int(task) for task in os.listdir(f"/proc/{pid}/task"))
    return next((task for task in tasks if read(f"/proc/{pid}/task/{task}/comm").strip() == _THREAD), None)


def tap(pid):
    """SIGUSR1 to the record's own thread: on another one it could end a sleep or a read of the program early."""
    with contextlib.suppress(OSError):
        thread, tgkill = record_thread(pid), getattr(ctypes.CDLL(None), "tgkill", None)
        if thread is not None and (tgkill is None or tgkill(pid, thread, int(signal.SIGUSR1)) != 0):
            os.kill(pid, signal.SIGUSR1)


def ancestors(pid):
    found = []
    while pid > 1 and pid not in found:
        found.append(pid)
        status = re.search(r"^PPid:\s*(\d+)", read(f"/proc/{pid}/status"), re.MULTILINE)
        pid = int(status.group(1)) if status else 0
    return found


def job_of(pid):
    environment = environment_of(pid)
    return tuple(environment.get(name, "") for name in _JOB)


def environment_of(pid):
    pairs = (part.partition("=") for part in read(f"/proc/{pid}/environ").split("\0"))
    return {key: value for key, _, value in pairs}


def answer_file(pid):
    """Where run_record.cc writes when asked."""
    folder = environment_of(pid).get("TMPDIR") or "/tmp"
    return os.path.join(folder, f"unshard-{os.stat(f'/proc/{pid}').st_uid}", f"asked.{pid}.json")


def silence(pid, wait_s):
    rank = environment_of(pid).get("RANK", "?")
    state = re.search(r"^State:\s*(\w)", read(f"/proc/{pid}/status"), re.MULTILINE)
    if state is None:
        return f"rank {rank} (pid {pid}) ended when it was asked"
    if state.group(1) in "Tt":
        return f"rank {rank} (pid {pid}) is stopped (by SIGSTOP or a debugger) and can't answer"
    return f"rank {rank} (pid {pid}) didn't answer within {wait_s:g} s"


def stamp(path):
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
