"""Several ranks for one model: this process is rank 0, which takes the requests, and starts the others."""
import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import time
import weakref

import torch.distributed as dist

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
    """The Communicator of rank 0, and the processes of the others, which compute `path` with it until it closes. Once a process.

    Raises ValueError where torch.distributed runs already: its group is another one."""
    if dist.is_initialized():
        raise ValueError("tensor_parallel: torch.distributed runs in this process already; one model is opened so in a process, and in a "
                         "launcher's job deepspeed.init_inference computes on several ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = options.get("threads") or max(1, len(os.sched_getaffinity(0)) // size)
    options["threads"] = threads
    followers = []
    try:
        for rank in range(1, size):
            arguments = json.dumps([str(path), options, rank, size, port])
            followers.append(subprocess.Popen([sys.executable, "-m", "unshard.inference.parallel", arguments], stdin=subprocess.DEVNULL))
        return join(0, size, port), followers
    except BaseException:
        end(followers)
        raise


def end(followers):
    """They end by themselves when rank 0's engine closes; who doesn't is ended."""
    until = time.monotonic() + _ENDS_WITHIN_S
    for process in followers:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def end_at_exit(engine, followers):
    """The engine first, which tells the followers, and before torch.distributed's end: atexit calls the latest first."""
    still = weakref.ref(engine)

    def close():
        if (alive := still()) is not None:
            alive.close()
        end(followers)
    atexit.register(close)


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
    _keep_to_own_cores(rank, options["threads"])
    try:
        follow(path, options, join(rank, size, port))
    except (RuntimeError, ValueError, OSError) as error:
        sys.exit(f"unshard: rank {rank}: {' '.join(str(error).split())}")


def _keep_to_own_cores(rank, threads):
    """Each rank pins its workers to the first cores it may use; rank 0 has those of the whole process."""
    own = sorted(os.sched_getaffinity(0))[rank * threads:(rank + 1) * threads]
    if len(own) == threads:
        os.sched_setaffinity(0, own)


if __name__ == "__main__":
    _main(sys.argv[1])
