"""`unshard bench comm`: how fast the engine's collectives are between these ranks, and whether they are right.

    unshard bench comm --ranks 2                          # starts two ranks here
    torchrun ... -m unshard.bench_comm --max 1G           # or under any launcher

Size, algbw and busbw mean what they mean in nccl-tests, so that figures compare.
"""
from unshard.streams import command


@command("unshard bench comm")
def main(argv=None, prog="unshard bench comm"):
    """Returns the exit code: 0, or 1 when any value was wrong or a rank failed, or 2 for a request that can't be met."""
    from unshard.bench_comm.command import run_command

    return run_command(argv, prog)
