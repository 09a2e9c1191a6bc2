"""Collectives of two ranks on one host: collectives.py unshard|gloo|deepspeed; rank 0 prints one JSON line.

Beside each time stand two bounds: the bytes the operation must read and write, at memcpy's bandwidth (`bound_us`: all ranks at once copy
the largest block, which no cache holds), and at the rate at which blocks of that very size are copied (`same_size_us`: small ones stay in
the core's own cache, faster than cores can exchange bytes). `bytes` is the size of the whole (gathered, unreduced) tensor.
"""
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

SIZES = [64 << 10, 1 << 20, 16 << 20, 256 << 20]


def traffic(operation, nbytes, world):
    """Bytes that one rank must at least read and write."""
    part = nbytes // world
    return {"all_gather": 2 * nbytes,                              # read all parts, write them
            "reduce_scatter": nbytes + part,                       # read every rank's slice for me, write the sum
            "all_reduce": nbytes + part + 2 * (nbytes - part)      # the same, then read and write the others' sums
            }[operation]


def timed(call, nbytes):
    repeats = max(5, min(400, (256 << 20) // nbytes))
    for _ in range(3):
        call()
    dist.barrier()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return {"median_us": statistics.median(seconds) * 1e6, "min_us": min(seconds) * 1e6}


def operations(kind):
    if kind == "unshard":
        from unshard import _core

        comm = _core.make_communicator(dist.group.WORLD, dist.distributed_c10d._get_default_store())
        return {"all_gather": comm.all_gather, "reduce_scatter": comm.reduce_scatter, "all_reduce": lambda full, _: comm.all_reduce(full)}
    if kind == "deepspeed":                    # its shared-memory operation exists for this one call
        import deepspeed
        import deepspeed.comm as ds_comm

        deepspeed.init_distributed("gloo")
        return {"all_reduce": lambda full, _: ds_comm.inference_all_reduce(full)}
    return {"all_gather": dist.all_gather_into_tensor, "reduce_scatter": dist.reduce_scatter_tensor,
            "all_reduce": lambda full, _: dist.all_reduce(full)}


def check(name, full, part, world):
    """Ranks hold 1, 2, ...: the results are small whole numbers, exact in any order."""
    total = world * (world + 1) / 2
    if name == "all_gather":
        return full.view(world, -1).eq(torch.arange(1.0, world + 1)[:, None]).all()
    return (part if name == "reduce_scatter" else full).eq(total).all()


def main():
    kind = sys.argv[1]
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = []
    for name, call in operations(kind).items():
        for nbytes in SIZES:
            full, part = torch.empty(nbytes // 4), torch.empty(nbytes // 4 // world)
            full.fill_(rank + 1)
            part.fill_(rank + 1)
            first, second = (part, full) if name == "reduce_scatter" else (full, part)
            call(first, second)
            right = bool(check(name, full, part, world))
            full.fill_(0)                       # repeated all_reduce must not overflow
            row = {"operation": name, "bytes": nbytes, "right": right, **timed(lambda c=call, a=first, b=second: c(a, b), nbytes)}
            target = torch.empty_like(full)
            row["copy_us"] = timed(lambda t=target, f=full: t.copy_(f), nbytes)["median_us"]
            row["same_size_us"] = row["copy_us"] * traffic(name, nbytes, world) / (2 * nbytes)
            rows.append(row)
    bytes_a_us = 2 * SIZES[-1] / statistics.median(row["copy_us"] for row in rows if row["bytes"] == SIZES[-1])
    for row in rows:
        row["bound_us"] = traffic(row["operation"], row["bytes"], world) / bytes_a_us
    if rank == 0:
        print("RESULT " + json.dumps({"kind": kind, "rows": rows}), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
