"""One mode's training step, run by every rank: train_step.py MODE fp32|bf16 STEPS BATCH [OPTIONS]; rank 0 prints one JSON line.

MODE: solo (compute and update only; the ranks run side by side without talking), ddp, fsdp2, unshard0..3, deepspeed2, deepspeed3.
Timed steps first, then three steps in which memory is sampled. bf16: solo and ddp autocast over fp32 weights, as their users do; the others
keep bf16 weights with fp32 masters. OPTIONS (JSON): "model": the GPT's sizes, "memory": false for no steps in which it is sampled, "link":
the network interface whose bytes are counted (all of this host's in the timed steps; the host that sends most).
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


def sharded_engine(module, model, stage, bf16, batch, waited):
    config = {"train_micro_batch_size_per_gpu": batch, "zero_optimization": {"stage": stage}, "bf16": {"enabled": bf16},
              "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}}, "gradient_clipping": 0.0,
              "steps_per_print": 10**9}
    engine, *_ = module.initialize(model=model, model_parameters=model.parameters(), config=config)
    if hasattr(module, "residency_stats"):
        waited.append(lambda: module.residency_stats(engine).get("exposed_wait_ms"))

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


def make_step(mode, model, bf16, batch, waited):
    """`waited` gets a function that says how many ms touches have waited for bytes so far, where the mode counts that."""
    if mode.startswith("unshard"):
        import unshard

        return sharded_engine(unshard, model, int(mode[-1]), bf16, batch, waited)
    if mode.startswith("deepspeed"):
        import deepspeed

        return sharded_engine(deepspeed, model, int(mode[-1]), bf16, batch, waited)
    return torch_step(mode, model, bf16)


def link_bytes(link):
    """Bytes this host has sent over its network interface; 0 without one."""
    if not link:
        return 0
    with open("/proc/self/net/dev", encoding="ascii") as file:
        line = next(line for line in file if line.strip().startswith(link + ":"))
    return int(line.split(":")[1].split()[8])


def sampled_memory(step, data):
    with PeakPss() as peak:
        for _ in range(MEMORY_STEPS):
            step(*next(data))
    return peak.mb


def main():
    mode, dtype, steps, batch = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    options = json.loads(sys.argv[5]) if len(sys.argv) > 5 else {}
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model, waited = GPT(**options.get("model", {})), []
    begin = time.perf_counter()
    step = make_step(mode, model, dtype == "bf16", batch, waited)
    initialize_s = time.perf_counter() - begin
    data, seconds, losses, warm_up = batches(rank, world, batch, CONTEXT), [], [], options.get("warm_up", WARM_UP)
    for number in range(warm_up + steps):
        if number == warm_up:
            dist.barrier()
            link_before, waited_before = link_bytes(options.get("link")), [count() for count in waited]
        tokens, targets = next(data)
        dist.barrier()
        begin = time.perf_counter()
        loss = step(tokens, targets)
        seconds.append(time.perf_counter() - begin)
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
    exposed = [after() - before for after, before in zip(waited, waited_before) if before is not None]
    sent = link_bytes(options.get("link")) - link_before
    pss_mb = sampled_memory(step, data) if options.get("memory", True) else 0.0
    step_ms = statistics.median(seconds[warm_up:]) * 1e3
    worst = torch.tensor([pss_mb, step_ms, sent / steps / 1e6, sum(exposed) / steps], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if rank == 0:
        print("RESULT " + json.dumps({"mode": mode, "dtype": dtype, "step_ms": worst[1].item(), "pss_mb": worst[0].item(),
                                      "initialize_s": initialize_s, "losses": losses, "link_mb": worst[2].item(),
                                      "exposed_ms": worst[3].item() if exposed else None}), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # torch's Gloo threads, which DDP leaves running, may abort a process that ends


if __name__ == "__main__":
    main()
