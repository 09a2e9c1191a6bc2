"""The process holds no more than the engine accounts for, and that no more than ZeRO's arithmetic (test_equality.py checks it by kind)."""
import ctypes
import gc
import os
import pathlib

import pytest
import torch
import torch.nn as nn
from ranks import run_ranks

MIB = 2**20
LAYERS, WIDTH = 16, 1024                    # 16.8 million parameters: megabytes of code and allocator are small beside them
PUBLISH = 24 * MIB                          # stages 1 and 2 gather updated parameters through 16 MiB, and send from half as much
WORKING = 16 * MIB                          # the largest gathered layer, activations, allocator
RING = 68 * MIB                             # gradient buckets on their way, which the accounts name apart: at most 64 MiB and two buckets


def pss():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    torch.distributed.barrier()             # memory that ranks share is split between those that have mapped it
    lines = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()
    held = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    torch.distributed.barrier()
    return held


def train(layers, width, stage, dtype):
    import unshard
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    engine, *_ = unshard.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000000, "stage3_max_live_parameters": 0,
                              "stage3_prefetch_bucket_size": 0}})
    del model
    for _ in range(2):
        engine.backward(engine(torch.ones(1, width, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)).float().mean())
        engine.step()
    return engine


def process_memory(rank, world, stage, dtype):
    train(2, 64, stage, dtype).destroy()    # code and pools that any engine needs
    before = pss()
    engine = train(LAYERS, WIDTH, stage, dtype)
    held = {kind: size for kind, size in engine.memory_report().items() if kind != "formula"}
    used = pss() - before
    engine.destroy()
    del engine
    return used, held, pss() - before


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_process_memory_is_at_most_the_formula(stage, dtype):
    world, psi = 2, LAYERS * WIDTH * WIDTH
    size, optimizer = (2, 12) if dtype == "bf16" else (4, 8)
    formula = psi * (size / (world if stage == 3 else 1) + 4 / (world if stage >= 2 else 1) + optimizer / (world if stage >= 1 else 1))
    for used, held, after in run_ranks(world, process_memory, stage, dtype, fresh=True):
        assert held["buckets"] <= RING
        assert used <= formula + held["buckets"] + PUBLISH + WORKING, (
            f"{used / MIB:.0f} MiB used, {formula / MIB:.0f} MiB by the formula; accounts: {held}")
        assert after <= PUBLISH + WORKING, f"destroy() left {after / MIB:.0f} MiB"


def status_bytes(key):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def disk_bytes_read():
    lines = pathlib.Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def drop_from_cache(folder):
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def cost_of_a_load(rank, world, path):
    folder = pathlib.Path(path)
    engine = train(8, WIDTH, 3, "bf16")
    engine.save_checkpoint(path, tag="tag")
    engine.load_checkpoint(path, tag="tag")                       # modules and pools that any load needs
    if rank == 0:
        drop_from_cache(folder)
    torch.distributed.barrier()
    pathlib.Path("/proc/self/clear_refs").write_text("5")                # the peak counts from here
    before, read = status_bytes("VmRSS"), disk_bytes_read()
    engine.load_checkpoint(path, tag="tag")
    cost = status_bytes("VmHWM") - before, disk_bytes_read() - read
    engine.destroy()
    return cost


def test_a_load_takes_each_byte_from_the_disk_once_and_little_memory(tmp_path):
    costs = run_ranks(2, cost_of_a_load, str(tmp_path), fresh=True)
    size = sum(file.stat().st_size for file in (tmp_path / "tag").iterdir())
    assert size > 96 * MIB
    for memory, _ in costs:
        assert memory <= 8 * MIB, f"{memory / MIB:.1f} MiB beside the state"
    read = sum(read for _, read in costs)
    assert read <= 1.1 * size, f"{read / MIB:.0f} MiB read of files of {size / MIB:.0f} MiB"
    if read:                                                             # else the folder is in memory
        assert read >= 0.9 * size
