"""How ranks start torch.distributed together, so that one that doesn't come, stops or dies meanwhile is named, and holds nobody."""
import os
import threading
import time

import torch.distributed as dist

from unshard.core import CommError, _core

POLL_S = 0.05
REPORT_S = 5.0                  # then who is waited for is said once
SPARE_S = 1.0                   # torch's own time-outs come first: they say more


def meet(start, method, address, rank, world_size, timeout):
    """Run `start(store)`, which makes torch's default group, on every rank. `method`: torch's init_method; `address`: (host, port) where
    it is the usual one, whose store is made here; `timeout`: a timedelta. Raises CommError."""
    seconds = timeout.total_seconds()
    where = f"{address[0]}:{address[1]}" if address else method
    own = f"this is rank {rank} of {world_size}"

    reported = []

    def in_store(waited):
        if rank == 1 and waited > REPORT_S and not reported:     # one of those that wait for rank 0 says so
            reported.append(waited)
            _core.log_warning(rank, f"[distributed] no progress for {REPORT_S:g} s, still waiting (until {seconds:g} s): rank 0, which "
                                    f"serves the store at {where} unless the launcher does, hasn't come or doesn't answer")
        if waited > seconds + SPARE_S:
            raise CommError(f"[distributed] the store at {where} doesn't answer within {seconds:g} s: rank 0, which serves it unless the "
                            f"launcher does, hasn't come, has ended or is stopped; {own}")

    try:
        store = aside(lambda: _store(method, address, rank, world_size, timeout), in_store)
        prefix = f"unshard/meeting/{aside(lambda: store.add(f'unshard/meetings/{rank}', 1), in_store)}"
    except RuntimeError as error:
        if isinstance(error, CommError):
            raise
        missing = f" rank 0, which serves the store unless the launcher does, hasn't come or has ended; {own}:" if rank else ""
        raise CommError(f"[distributed] rank {rank} of {world_size} can't meet the others at {where}:{missing} {_line(error)}") from error
    roll = _core.RollCall(dist.PrefixStore(prefix, store), rank, world_size, "init_distributed", seconds)
    try:
        roll.exchange("", "the meeting")
        roll.set_place("torch's init_process_group")
        _start(start, store, roll, seconds, own)
        roll.finish()
    except BaseException as error:
        roll.fail(_line(error) or type(error).__name__)
        raise


def _start(start, store, roll, seconds, own):
    def in_torch(waited):
        roll.check()
        if waited > seconds + SPARE_S:
            raise TimeoutError(f"no progress for {seconds:g} s")

    try:
        aside(lambda: start(dist.PrefixStore("default_pg", store)), in_torch)
    except CommError:
        raise
    except (RuntimeError, TimeoutError) as error:                # torch's and Gloo's name nobody
        raise CommError(f"[distributed] torch.distributed doesn't start: {roll.explain() or 'every rank is there'}; {own}: "
                        f"{_line(error)}") from error


def aside(function, check):
    """What `function` returns or raises, on a thread of its own; `check(seconds waited)` is called meanwhile and leaves by raising: calls
    of torch's never return when a store's server has stopped."""
    done, found = threading.Event(), {}

    def run():
        try:
            found["value"] = function()
        except BaseException as error:
            found["error"] = error
        done.set()

    threading.Thread(target=run, daemon=True, name="unshard meeting").start()
    begin = time.monotonic()
    while not done.wait(POLL_S):
        check(time.monotonic() - begin)
    if "error" in found:
        raise found["error"]
    return found["value"]


def _store(method, address, rank, world_size, timeout):
    if address is None:
        store, *_ = next(dist.rendezvous(method, rank, world_size, timeout=timeout))
        store.set_timeout(timeout)
        return store
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"      # by torchrun's agent
    more = {} if served else {"multi_tenant": True}
    return dist.TCPStore(*address, world_size, rank == 0 and not served, timeout, wait_for_workers=False, **more)


def _line(error):
    return str(error).splitlines()[0] if str(error) else ""
