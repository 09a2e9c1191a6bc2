"""The optimizer's update on one process with one thread: update.py KIND MILLIONS; prints one JSON line.

bare fp32 AdamW on one flat tensor (28 bytes of traffic an element):  torch_fused, deepspeed_cpu_adam, unshard
the whole update of bf16 weights with fp32 masters (norm, unscale, clip, AdamW, cast), as engine.step() does it:
    whole_torch (plain PyTorch: fp32 masters, clip_grad_norm_, fused AdamW, copy), whole_deepspeed, whole_unshard
"""
import json
import os
import statistics
import sys
import time

import torch

ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
REPEATS, WARM_UP = 9, 2


class Flat(torch.nn.Module):
    """One parameter whose gradient is a given tensor."""

    def __init__(self, n):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(n))

    def forward(self, gradient):
        return (self.weight * gradient).sum()


def gradient(n, dtype=torch.float32):
    return torch.linspace(-1e-2, 1e-2, n).to(dtype)


def bare_torch(n):
    weight = torch.nn.Parameter(torch.zeros(n))
    weight.grad = gradient(n)
    optimizer = torch.optim.AdamW([weight], fused=True, **ADAMW)
    return optimizer.step, lambda: weight


def bare_deepspeed(n):
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    weight = torch.nn.Parameter(torch.zeros(n))
    weight.grad = gradient(n)
    return DeepSpeedCPUAdam([weight], **ADAMW).step, lambda: weight


def bare_unshard(n):
    from unshard import _core

    weight, grad = torch.zeros(n), gradient(n)
    optimizer, group = _core.make_optimizer("adamw"), _core.GroupOptions()
    group.lr, (group.beta1, group.beta2), group.eps, group.weight_decay = ADAMW["lr"], ADAMW["betas"], ADAMW["eps"], ADAMW["weight_decay"]
    return lambda: optimizer.step([(0, 0, weight, None, grad)], [group]), lambda: weight


def whole_torch(n):
    weight, grad = torch.zeros(n, dtype=torch.bfloat16), gradient(n, torch.bfloat16)
    master = torch.nn.Parameter(weight.float())
    optimizer = torch.optim.AdamW([master], fused=True, **ADAMW)

    def step():
        master.grad = grad.float()
        torch.nn.utils.clip_grad_norm_([master], 1.0)
        optimizer.step()
        weight.copy_(master)

    return step, lambda: weight


def whole_engine(name, n):
    """Only engine.step() is timed; forward and backward lay the gradient in place for it."""
    module = __import__(name)
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"})
    model = Flat(n)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
              "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}}, "steps_per_print": 10**9}
    engine, *_ = module.initialize(model=model, model_parameters=model.parameters(), config=config)
    grad = gradient(n, torch.bfloat16)

    def prepare():
        engine.backward(engine(grad))

    return engine.step, lambda: next(engine.module.parameters()), prepare


KINDS = {"torch_fused": bare_torch, "deepspeed_cpu_adam": bare_deepspeed, "unshard": bare_unshard, "whole_torch": whole_torch,
         "whole_deepspeed": lambda n: whole_engine("deepspeed", n), "whole_unshard": lambda n: whole_engine("unshard", n)}


def main():
    kind, n = sys.argv[1], int(float(sys.argv[2]) * 1e6)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    step, weight, *prepare = KINDS[kind](n)
    seconds = []
    for _ in range(WARM_UP + REPEATS):
        for call in prepare:
            call()
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    seconds = seconds[WARM_UP:]
    print("RESULT " + json.dumps({"kind": kind, "numel": n, "median_ms": statistics.median(seconds) * 1e3, "min_ms": min(seconds) * 1e3,
                                  "checksum": weight().detach().double().sum().item(),
                                  "norm": weight().detach().double().norm().item()}), flush=True)


if __name__ == "__main__":
    main()
