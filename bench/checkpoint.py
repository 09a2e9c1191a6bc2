"""Saving and loading a checkpoint: checkpoint.py unshard|deepspeed FOLDER MILLIONS ROUNDS; prints one JSON line.

bf16 weights with fp32 masters and two moments at ZeRO 3. Every round saves under a new tag, takes the files out of the page cache and loads
them. One round goes before those that are timed, its load is told apart: the host of a virtual machine hands out memory when it is first
used, which for the page cache can take longer than the disk does, and dd's file has been through that memory when dd reads it. A time is
from a barrier before the call to a barrier after it; memory is the largest growth of a rank's resident size inside it, in any round.
"""
import json
import os
import pathlib
import statistics
import sys
import time

import torch
import torch.distributed as dist

what, folder, millions, rounds = sys.argv[1], pathlib.Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
module = __import__(what)
WIDTH = 2048
config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "steps_per_print": 10**9,
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}, "zero_optimization": {"stage": 3}}


def resident_mb(key):
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) / 1024


def measured(call):
    """(seconds, MB of memory at most beside what was there) of a collective call."""
    dist.barrier()
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")                                  # the peak counts from here
    before, begin = resident_mb("VmRSS"), time.perf_counter()
    call()
    mine = resident_mb("VmHWM") - before
    dist.barrier()
    seconds = time.perf_counter() - begin
    peaks = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, mine)
    return seconds, max(peaks)


def for_files(path, call):
    for file in path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            call(descriptor)
            os.close(descriptor)


def until_on_disk(path):
    """Seconds until what was saved would survive a loss of power: what is still in memory only when save_checkpoint returns."""
    begin = time.perf_counter()
    for_files(path, os.fsync)
    return time.perf_counter() - begin


def drop_from_cache(path):
    for_files(path, lambda descriptor: os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED))


layers = max(1, round(millions * 1e6 / WIDTH**2))
model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
engine = module.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().pow(2).mean())
engine.step()
rank, saves, on_disk, loads, memory = dist.get_rank(), [], [], [], {"save": 0.0, "load": 0.0}
for number in range(rounds + 1):
    seconds, peak = measured(lambda: engine.save_checkpoint(str(folder), tag=f"tag{number}"))      # noqa: B023
    saves.append(seconds)
    memory["save"] = max(memory["save"], peak)
    if rank == 0:
        on_disk.append(seconds + until_on_disk(folder))
        drop_from_cache(folder)
    seconds, peak = measured(lambda: engine.load_checkpoint(str(folder), tag=f"tag{number}"))      # noqa: B023
    loads.append(seconds)
    memory["load"] = max(memory["load"], peak)
if rank == 0:
    size = sum(file.stat().st_size for file in (folder / "tag0").rglob("*") if file.is_file())
    print("RESULT " + json.dumps({
        "mode": what, "bytes": size, "save_s": statistics.median(saves[1:]), "load_s": statistics.median(loads[1:]),
        "save_on_disk_s": statistics.median(on_disk[1:]), "first_load_s": loads[0], "save_s_all": saves, "load_s_all": loads,
        "save_extra_mb": memory["save"], "load_extra_mb": memory["load"]}), flush=True)
dist.barrier()
