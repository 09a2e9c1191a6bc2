"""What interception costs an operator: touch.py; two ranks, rank 0 prints one JSON line.

`touched_us`: negating a small partitioned, resident parameter, less the same on a plain tensor. `others_us`: a plain tensor with Unshard at
work, less the same before it was imported.
"""
import json
import os
import statistics
import time

import torch

CALLS, ROUNDS = 5000, 21


def per_call_us(tensor):
    times = []
    with torch.no_grad():
        for _ in range(ROUNDS):
            begin = time.thread_time()         # not wall time: the other rank and the machine's noise stay out
            for _ in range(CALLS):
                torch.neg(tensor)
            times.append((time.thread_time() - begin) / CALLS * 1e6)
    return statistics.median(times), min(times)


def main():
    plain = torch.nn.Parameter(torch.ones(4, 4))
    per_call_us(plain)
    before = per_call_us(plain)
    import unshard

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "steps_per_print": 10**9,
              "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    engine, *_ = unshard.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine(torch.ones(1, 4))
    touched = per_call_us(model[0].weight)
    after = per_call_us(plain)
    if os.environ["RANK"] == "0":
        result = {"plain_us": before[1], "touched_us": touched[1] - after[1], "others_us": after[1] - before[1]}
        print("RESULT " + json.dumps(result), flush=True)
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
