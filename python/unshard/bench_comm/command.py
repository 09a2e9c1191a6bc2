"""The command: as one rank of a launcher's, or as the one who starts ranks on this host."""
import contextlib
import dataclasses
import json
import os
import sys
import types

from unshard.bench_comm import table
from unshard.bench_comm.options import parse, sizes

TENSORS = 3                 # of the largest size that a rank holds at once: given, expected, found


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
    from unshard.launcher.devices import device_count

    ranks = options.ranks or default_ranks(options)
    if options.device == "cpu" or not device_count():
        refuse_too_much(options, ranks)               # here it is one line, not one from each rank
    with on_the_cpu() if options.device == "cpu" else contextlib.nullcontext():
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
    from unshard.streams import BROKEN_PIPE

    if options.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    device = distributed.device_of_this_rank()
    if options.device == "cuda" and device.type != "cuda":
        raise ValueError("[bench.comm] --device=cuda, but torch sees no GPU here (`unshard report` may say why)")
    if device.type == "cpu":
        refuse_too_much(options, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    try:
        distributed.init_distributed()
        comm = communicator(options.backend, device)
        world = describe(comm, device, options.dtype, introduce(comm, device))
        say = print_now if comm.rank == 0 else lambda text: None
        say("\n".join(table.head(world)))
        rows = bench(comm, options.ops, sizes(options), getattr(torch, options.dtype), device, options.iters, say)
        say(table.last_line(rows))
        problem = write_json(options.json, world, rows) if options.json and comm.rank == 0 else ""
        comm.barrier("bench.comm")                    # no rank ends, well or not, before rank 0 has said how it went
        if problem:
            raise ValueError(problem)
    except BrokenPipeError:                           # nobody wants the table any more
        os._exit(BROKEN_PIPE)                         # at once: the launcher ends the others before they can complain about it
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


def refuse_too_much(options, ranks):
    """Where the tensors are in the memory of this host: Linux would promise more of it than there is, and kill the rank that takes it."""
    from unshard.report import Machine
    from unshard.report.memory import memory

    facts = memory(Machine())
    have, need = facts["limit_bytes"] or facts["total_bytes"], TENSORS * sizes(options)[-1] * ranks
    if need > have:
        raise ValueError(f"[bench.comm] --max={options.max}: {TENSORS} tensors of {sizes(options)[-1]} bytes on each of {ranks} ranks are "
                         f"more than this host's {have >> 30} GiB; give a smaller --max")


def write_json(path, world, rows):
    """"" or why it can't be written."""
    content = {**world, "rows": [dataclasses.asdict(row) for row in rows], "average_busbw_GBps": table.average(rows),
               "wrong": sum(row.wrong for row in rows)}
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
    except OSError as error:
        return f"[bench.comm] --json={path} can't be written: {error.strerror}"
    return ""
