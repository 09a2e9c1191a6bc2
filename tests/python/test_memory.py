"""The process holds no more than the engine accounts for, and that no more than ZeRO's arithmetic (test_equality.py checks it by kind)."""
import ctypes
import gc
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
