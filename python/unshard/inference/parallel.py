"""Several ranks for one model: this process is rank 0, which takes the requests, and starts the others."""
import atexit
import json
import os
import signal
import socket
import subprocess
import sys

from unshard import distributed

_ENDS_WITHIN_S = 10


def join(rank=None, size=None, port=None):
    """The Communicator of this rank: of a launcher's job, or of the ranks that start() started."""
    if port is None:
        distributed.init_distributed(dist_backend="gloo")
    else:
        distributed.init_distributed(dist_backend="gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    return distributed.make_communicator()


def start(path, options, size):
    """The Communicator of rank 0, and the processes of the others, which compute `path` with it until it closes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = options.get("threads") or max(1, len(os.sched_getaffinity(0)) // size)
    options["threads"] = threads
    followers = [subprocess.Popen([sys.executable, "-m", "unshard.inference.parallel", json.dumps([str(path), options, rank, size, port])],
                                  stdin=subprocess.DEVNULL) for rank in range(1, size)]
    atexit.register(end, followers)
    try:
        return join(0, size, port), followers
    except BaseException:
        end(followers)
        raise


def end(followers):
    """They end by themselves when rank 0's engine closes; who doesn't is ended."""
    for process in followers:
        try:
            process.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def follow(path, options, comm):
    """Compute with rank 0 until it closes its engine."""
    from unshard.core import _core
    engine = _core.InferenceEngine(str(path), options, comm)
    engine.follow()
    engine.close()


def _main(arguments):
    path, options, rank, size, port = json.loads(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)           # Ctrl-C goes to the whole terminal; rank 0 says when it is time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    follow(path, options, join(rank, size, port))


if __name__ == "__main__":
    _main(sys.argv[1])
