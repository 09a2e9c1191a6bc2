"""Runs a bench script on N processes with one thread each, and returns the object on its RESULT line."""
import json
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import time

BENCH = pathlib.Path(__file__).resolve().parent


class BenchError(Exception):
    """A bench script failed or ran too long; the text has the end of what it said."""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(python, script, *arguments, ranks=2, limit=240, threads=1, start=None):
    """`start(rank, command, env, **options)` starts a rank elsewhere, in a session of its own."""
    start = start or (lambda rank, command, env, **options: subprocess.Popen(command, env=env, start_new_session=True, **options))
    env = dict(os.environ, WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), LOCAL_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
               MASTER_PORT=str(free_port()), OMP_NUM_THREADS=str(threads), GLOO_SOCKET_IFNAME="lo", DS_ACCELERATOR="cpu",
               PATH=os.pathsep.join([str(pathlib.Path(python).parent), os.environ.get("PATH", "")]))
    processes = []
    with tempfile.TemporaryFile("w+") as output:
        try:
            for rank in range(ranks):
                command = [python, str(BENCH / script), *map(str, arguments)]
                processes.append(start(rank, command, dict(env, RANK=str(rank), LOCAL_RANK=str(rank)), stdout=output, stderr=output))
            wait_for_all(processes, limit)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        output.seek(0)
        text = output.read()
    results = [line[7:] for line in text.splitlines() if line.startswith("RESULT ")]
    if len(results) != 1 or any(process.returncode for process in processes):
        codes = [process.returncode for process in processes]
        raise BenchError(f"{script} {' '.join(map(str, arguments))}: exit codes {codes}\n" + "\n".join(text.splitlines()[-15:]))
    return json.loads(results[0])


def wait_for_all(processes, limit):
    end = time.monotonic() + limit
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            end = min(end, time.monotonic() + 10)            # the others get a moment to fail too
        if time.monotonic() > end:
            return
        time.sleep(0.05)
