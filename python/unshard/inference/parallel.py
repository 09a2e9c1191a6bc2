"""The engines of one model: several replicas, and several ranks of each. This process is rank 0 of all of them, and starts the others."""
import atexit
import concurrent.futures
import datetime
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref

_ENDS_WITHIN_S = 10
_ENDS_BY_ITSELF_S = 2
_MEETS_WITHIN = datetime.timedelta(minutes=30)


def open_engines(path, options, ranks=1, replicas=1):
    """[InferenceEngine, ...]: `replicas` of them, of `ranks` ranks each. Threads and cores are shared out evenly unless options name the
    threads, of a rank."""
    cores = sorted(os.sched_getaffinity(0))
    if ranks * replicas > 1:
        options = {**options, "threads": options.get("threads") or max(1, len(cores) // (ranks * replicas))}
    if replicas == 1:
        return [_open(path, options, ranks, cores)]
    width = options["threads"] * ranks
    own = [cores[i * width:(i + 1) * width] if replicas * width <= len(cores) else [] for i in range(replicas)]

    def opened(mine):
        _keep_to(mine[:options["threads"]])                # this thread, and so all that the engine starts
        return _open(path, options, ranks, mine)
    with concurrent.futures.ThreadPoolExecutor(replicas) as pool:
        opening = [pool.submit(opened, mine) for mine in own]
        concurrent.futures.wait(opening)
    if failed := next((one for one in opening if one.exception()), None):
        for one in opening:
            if one.exception() is None:
                one.result().close()
        failed.result()
    return [one.result() for one in opening]


def _open(path, options, ranks, cores):
    from unshard import _inference                         # it needs no torch, which takes a second to load
    if ranks == 1:
        return _inference.InferenceEngine(str(path), options)
    comm, followers = start(path, options, ranks, cores)
    try:
        engine = _inference.InferenceEngine(str(path), options, comm)
    except BaseException:
        end(followers)
        raise
    end_at_exit(engine, followers)
    return engine


def join(rank=None, size=None, port=None, check=None):
    """The Communicator of this rank: of a launcher's job, or of the ranks that start() started, which are a group of their own beside any
    that torch.distributed has. check: called while waiting for the others; leaves by raising."""
    from unshard import distributed, meeting
    if port is None:
        distributed.init_distributed(dist_backend="gloo")
        return distributed.make_communicator()
    import torch.distributed as dist

    from unshard.core import _core
    made = {}

    def start(store):
        made["group"] = _group(dist, store, rank, size)
        made["store"] = dist.PrefixStore("unshard", store)
    meet = functools.partial(meeting.meet, start, None, ("127.0.0.1", port), rank, size, _MEETS_WITHIN)
    meeting.aside(meet, lambda _: check and check())
    settings = _core.Config.from_json("{}").unshard
    return _core.make_communicator(made["group"], made["store"], settings.share_memory, settings.timeout_s, settings.collective_check_s)


def _group(dist, store, rank, size):
    """A Gloo group of this host's processes that is no default group: a process may have many."""
    import torch
    gloo = dist.ProcessGroupGloo._Options()
    gloo._devices, gloo._timeout = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")], _MEETS_WITHIN
    group = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, gloo)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)
    return group


def start(path, options, size, cores):
    """The Communicator of rank 0, and the processes of the others, which compute `path` with it until it closes. `cores`: of all ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    followers = []

    def all_live():
        for rank, process in enumerate(followers, 1):
            if process.poll() is not None:
                raise RuntimeError(f"{path}: rank {rank} of {size} ended before it joined (exit code {process.returncode}); "
                                   "its own error says why")
    try:
        for rank in range(1, size):
            mine = cores[rank * options["threads"]:(rank + 1) * options["threads"]]
            arguments = json.dumps([str(path), options, rank, size, port, mine])
            # The pipe tells it that this process has ended, in whatever way.
            followers.append(subprocess.Popen([sys.executable, "-m", "unshard.inference.parallel", arguments], stdin=subprocess.PIPE))
        return join(0, size, port, all_live), followers
    except BaseException:
        end(followers, 0)                    # nobody tells them anything yet
        raise


def end(followers, within_s=_ENDS_WITHIN_S):
    """They end by themselves when rank 0's engine closes, or (who has no engine yet) when their pipe does; who doesn't is ended."""
    _wait(followers, min(within_s, _ENDS_BY_ITSELF_S))
    for process in followers:
        process.stdin.close()
    for process in _wait(followers, within_s):
        process.kill()
        process.wait()


def _wait(processes, seconds):
    """Those that still run then."""
    until = time.monotonic() + seconds
    while running := [process for process in processes if process.poll() is None]:
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    return running


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
    from unshard import _inference
    engine = _inference.InferenceEngine(str(path), options, comm)
    engine.follow()
    engine.close()


def _main(arguments):
    path, options, rank, size, port, cores = json.loads(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)           # Ctrl-C goes to the whole terminal; rank 0 says when it is time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_rank_0, args=(rank,), daemon=True).start()
    _keep_to(cores if len(cores) == options["threads"] else [])
    try:
        follow(path, options, join(rank, size, port))
    except (RuntimeError, ValueError, OSError) as error:
        sys.exit(f"unshard: rank {rank}: {' '.join(str(error).split())}")


def _end_with_rank_0(rank):
    """Rank 0 holds the other end of the standard input: when it is gone, so is whoever would be computed for. Collectives find that out
    too, but not while weights are read."""
    while os.read(0, 1 << 10):
        pass
    os.write(2, f"unshard: rank {rank}: rank 0 has ended\n".encode())
    os._exit(1)


def _keep_to(cores):
    """This thread and those that it will start. Each engine pins its workers to the first cores that it may use."""
    if cores:
        os.sched_setaffinity(0, cores)


if __name__ == "__main__":
    _main(sys.argv[1])
