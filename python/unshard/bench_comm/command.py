"""The command: as one rank of a launcher's, or as the one who starts ranks on this host."""
import contextlib
import dataclasses
import json
import os
import sys
import types

from unshard.bench_comm import table
from unshard.bench_comm.options import parse, sizes


def run_command(argv, prog):
    argv = list(sys.argv[1:] if argv is None else argv)
    options = parse(argv, prog)
    from unshard import distributed

    try:
        world = distributed.world_from_environment()[1]
        launched = world > 1 or "WORLD_SIZE" in os.environ
        if launched and options.ranks not in (None, world):
            raise ValueError(f"[bench.comm] --ranks={options.ranks}, but the launcher started {world}; leave --ranks out")
        if not launched and options.ranks != 1:
            return start_ranks(options, argv)
        return run_rank(options)
    except ValueError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2


def start_ranks(options, argv):
    """On this host, whatever the hostfile of a job says."""
    from unshard.launcher import main as run

    with on_the_cpu() if options.device == "cpu" else contextlib.nullcontext():
        ranks = options.ranks or default_ranks(options)
        return run(["--quiet", f"--num_gpus={ranks}", f"--hostfile={os.devnull}", "--no_local_rank",
                    "--no_rank_prefix", "--module", "unshard.bench_comm", *argv])


def default_ranks(options):
    import torch

    return 2 if options.device == "cpu" else torch.cuda.device_count() or 2


@contextlib.contextmanager
def on_the_cpu():
    """The launcher gives a rank a GPU each where it sees any."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def run_rank(options):
    import torch

    from unshard import distributed
    from unshard.bench_comm.world import describe, introduce
    from unshard.core import CommError

    if options.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    device = distributed.device_of_this_rank()
    if options.device == "cuda" and device.type != "cuda":
        raise ValueError("[bench.comm] --device=cuda, but torch sees no GPU here (`unshard report` may say why)")
    try:
        distributed.init_distributed()
        comm = communicator(options.backend, device)
        world = describe(comm, device, options.dtype, introduce(comm, device))
        say = print_now if comm.rank == 0 else lambda text: None
        say("\n".join(table.head(world)))
        rows = bench(comm, options.ops, sizes(options), getattr(torch, options.dtype), device, options.iters, say)
        say(table.last_line(rows))
        if options.json and comm.rank == 0:
            write_json(options.json, world, rows)
        comm.barrier("bench.comm")                    # no rank ends, well or not, before rank 0 has said how it went
    except CommError as error:
        print(f"unshard bench comm: {error}", file=sys.stderr)
        return 1
    return 1 if any(row.wrong for row in rows) else 0


def bench(comm, names, all_sizes, dtype, device, iterations, say):
    """[Row] on every rank; `say` is given each line of the table as it comes. Collective."""
    from unshard.bench_comm.measure import measure
    from unshard.bench_comm.operations import OPERATIONS

    rows = []
    for name in names:
        operation = OPERATIONS[name]()
        if comm.world_size < operation.least_ranks:
            say(f"# {name} needs {operation.least_ranks} ranks: left out")
            continue
        for nbytes in all_sizes:
            rows.append(measure(comm, operation, nbytes, dtype, device, iterations))
            say(table.line(rows[-1]))
    return rows


def communicator(backend, device):
    """`auto` is what training would use."""
    from unshard import distributed
    from unshard.core import _core

    if backend == "shared" and device.type != "cpu":
        raise ValueError("[bench.comm] --backend=shared moves tensors of the CPU; add --device=cpu")
    settings = _core.Config.from_json("{}").unshard
    if backend != "auto":                             # goes before the environment's UNSHARD_SHARE_MEMORY
        known = {name: getattr(settings, name) for name in dir(settings) if not name.startswith("_")}
        settings = types.SimpleNamespace(**{**known, "share_memory": backend == "shared"})
    comm = distributed.make_communicator(settings)
    if backend == "shared" and comm.world_size > 1 and not comm.shares_memory:
        raise ValueError("[bench.comm] --backend=shared, but these ranks don't share memory: they run on several hosts (or in "
                         "containers, which count as such)")
    return comm


def print_now(text):
    print(text, flush=True)


def write_json(path, world, rows):
    content = {**world, "rows": [dataclasses.asdict(row) for row in rows], "average_busbw_GBps": table.average(rows),
               "wrong": sum(row.wrong for row in rows)}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
