"""One mode's training step, run by every rank: train_step.py MODE fp32|bf16 STEPS BATCH; rank 0 prints one JSON line.

MODE: solo (compute and update only; the ranks run side by side without talking), ddp, fsdp2, unshard0..3, deepspeed2, deepspeed3.
Timed steps first, then three steps in which memory is sampled. bf16: solo and ddp autocast over fp32 weights, as their users do; the others
keep bf16 weights with fp32 masters.
"""
import contextlib
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from gpt import GPT, batches
from memory import PeakPss

ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
CONTEXT, WARM_UP, MEMORY_STEPS = 256, 2, 3


def sharded_engine(module, model, stage, bf16, batch):
    config = {"train_micro_batch_size_per_gpu": batch, "zero_optimization": {"stage": stage}, "bf16": {"enabled": bf16},
              "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}}, "gradient_clipping": 0.0,
              "steps_per_print": 10**9}
    engine, *_ = module.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(tokens, targets):
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def torch_step(mode, model, bf16):
    dist.init_process_group("gloo")
    autocast = torch.autocast("cpu", torch.bfloat16) if bf16 and mode != "fsdp2" else contextlib.nullcontext()
    if mode == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif mode == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        options = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),)), "reshard_after_forward": True}
        if bf16:
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(tokens, targets):
        optimizer.zero_grad(set_to_none=True)
        with autocast:
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        return loss

    return step


def make_step(mode, model, bf16, batch):
    if mode.startswith("unshard"):
        import unshard

        return sharded_engine(unshard, model, int(mode[-1]), bf16, batch)
    if mode.startswith("deepspeed"):
        import deepspeed

        return sharded_engine(deepspeed, model, int(mode[-1]), bf16, batch)
    return torch_step(mode, model, bf16)


def main():
    mode, dtype, steps, batch = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = GPT()
    begin = time.perf_counter()
    step = make_step(mode, model, dtype == "bf16", batch)
    initialize_s = time.perf_counter() - begin
    data, seconds, losses = batches(rank, world, batch, CONTEXT), [], []
    for _ in range(WARM_UP + steps):
        tokens, targets = next(data)
        dist.barrier()
        begin = time.perf_counter()
        loss = step(tokens, targets)
        seconds.append(time.perf_counter() - begin)
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
    with PeakPss() as peak:
        for _ in range(MEMORY_STEPS):
            step(*next(data))
    worst = torch.tensor([peak.mb, statistics.median(seconds[WARM_UP:]) * 1e3])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if rank == 0:
        print("RESULT " + json.dumps({"mode": mode, "dtype": dtype, "step_ms": worst[1].item(), "pss_mb": worst[0].item(),
                                      "initialize_s": initialize_s, "losses": losses}), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
