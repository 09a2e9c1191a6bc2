"""Ranks that wait in vain, or leave; what each is told. Run by test_waiting.py, in ranks (pool.py)."""
import os
import pathlib
import signal
import threading
import time

import dense
import torch
import torch.nn as nn


def made(stage=3, timeout=8):
    import unshard
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    engine, *_ = unshard.initialize(model=model, model_parameters=list(model.parameters()),
                                    config=dense.config(stage, unshard={"timeout_s": timeout, "collective_check_s": timeout / 2}))
    return engine


def backward(engine):
    engine.backward(engine(torch.ones(2, 16)).square().mean())


def told(begin, call):
    """[seconds, "CommError: ..."], or ["", ...] of a call that came through."""
    try:
        call()
        text = ""
    except (Exception, KeyboardInterrupt) as error:
        text = f"{type(error).__name__}: {error}"
    return [time.monotonic() - begin, text]


def until_cut(rank, world, stage, folder):
    engine = made(stage, 6)
    pathlib.Path(folder, f"up{rank}").touch()
    begin = time.monotonic()

    def steps():
        while True:
            backward(engine)
            engine.step()
            time.sleep(0.002)

    return told(begin, steps)


def opposite_order(rank, world):
    engines = [made(3, 5), made(0, 5)]
    for engine in engines:
        backward(engine)
    first, second = engines if rank == 0 else engines[::-1]

    def steps():
        first.step()
        second.step()

    answer = told(time.monotonic(), steps)
    time.sleep(2)                                    # rank 0 serves the store
    return answer


def late(rank, world):
    """Rank 1 doesn't come to the second step in time."""
    engine = made(3, 4)
    backward(engine)
    engine.step()
    if rank == 1:
        time.sleep(9)
        return [0, ""]
    backward(engine)
    answer = told(time.monotonic(), engine.step)
    time.sleep(1)
    return answer


def interrupted(rank, world, stage):
    """Rank 0 waits in step(), where Ctrl-C comes; the others come later."""
    engine = made(stage)
    backward(engine)
    engine.step()
    backward(engine)
    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)        # ignored where the tests run in the background
        threading.Timer(0.7, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    else:
        time.sleep(1.5)
    answer = told(time.monotonic(), engine.step)
    time.sleep(2)
    return answer


def raises_in_init(rank, world):
    import unshard
    config = dense.config(3, unshard={"timeout_s": 8})

    def build():
        with unshard.zero.Init(config_dict_or_path=config):
            first = nn.Linear(8, 8)
            if rank == 1:
                raise ValueError("no such layer")
            model = nn.Sequential(first, nn.Linear(8, 8))
        unshard.initialize(model=model, config=config)

    answer = told(time.monotonic(), build)
    time.sleep(2)
    return answer
