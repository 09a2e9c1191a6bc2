"""What is measured. For each operation: its buffers, the call, the right result, and the factor from algbw to busbw.

`count` is the number of elements of the whole tensor: gathered, unreduced, or the message.
"""
import functools


class Operation:
    name = ""
    splits = False              # count must be a multiple of the ranks
    sums = False                # values of all ranks are added up
    in_place = False            # the output is the input
    least_ranks = 1

    def bus_factor(self, world):
        """busbw / algbw: what each link carries, as a part of the size (nccl-tests' definition)."""
        return 1.0

    def input(self, values, rank, world, count):
        return values.of(rank, count)

    def output_count(self, world, count):
        return count

    def run(self, comm, output, input):
        raise NotImplementedError

    def expected(self, values, rank, world, count):
        raise NotImplementedError


class AllReduce(Operation):
    name, sums, in_place = "all_reduce", True, True

    def bus_factor(self, world):
        return 2 * (world - 1) / world

    def run(self, comm, output, input):
        comm.all_reduce(output)

    def expected(self, values, rank, world, count):
        return values.sum(count)


class ReduceScatter(Operation):
    name, splits, sums = "reduce_scatter", True, True

    def bus_factor(self, world):
        return (world - 1) / world

    def output_count(self, world, count):
        return count // world

    def run(self, comm, output, input):
        comm.reduce_scatter(output, input)

    def expected(self, values, rank, world, count):
        return values.sum(count // world, start=rank * (count // world))


class AllGather(Operation):
    name, splits = "all_gather", True

    def bus_factor(self, world):
        return (world - 1) / world

    def input(self, values, rank, world, count):
        return values.of(rank, count // world)

    def run(self, comm, output, input):
        comm.all_gather(output, input)

    def expected(self, values, rank, world, count):
        return values.joined((peer, count // world, 0) for peer in range(world))


class Broadcast(Operation):
    name, in_place = "broadcast", True

    def input(self, values, rank, world, count):
        return values.of(rank, count)            # only rank 0's survives

    def run(self, comm, output, input):
        comm.broadcast(output, 0)

    def expected(self, values, rank, world, count):
        return values.of(0, count)


class AllToAll(Operation):
    name, splits = "all_to_all", True

    def bus_factor(self, world):
        return (world - 1) / world

    def run(self, comm, output, input):
        comm.all_to_all(output, input)

    def expected(self, values, rank, world, count):
        part = count // world
        return values.joined((peer, part, rank * part) for peer in range(world))


class SendRecv(Operation):
    """Every rank sends to the next one and receives from the one before; a send may wait for its receiver, so odd ranks receive first."""
    name, least_ranks = "send_recv", 2

    def run(self, comm, output, input):
        after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        if comm.rank % 2:
            comm.recv(output, before)
            comm.send(input, after)
        else:
            comm.send(input, after)
            comm.recv(output, before)

    def expected(self, values, rank, world, count):
        return values.of((rank - 1) % world, count)


OPERATIONS = {kind.name: kind for kind in (AllReduce, ReduceScatter, AllGather, Broadcast, AllToAll, SendRecv)}


class Values:
    """Rank r holds (i + 37 r) mod period at i: whole numbers that the dtype holds exactly, and their sum over ranks too, in any order.

    The period is odd, so that a part that lands at the wrong multiple of a power of two is seen.
    """
    LONGEST = 251

    def __init__(self, world, dtype, sums, device="cpu"):
        import torch

        self.world, self.dtype, self.device = world, dtype, device
        largest = {torch.float32: 1 << 24, torch.bfloat16: 1 << 8, torch.float16: 1 << 11}[dtype]      # all whole numbers up to it
        period = min(self.LONGEST, largest // world + 1) if sums else self.LONGEST
        self.period = period - 1 + period % 2 if period > 2 else period
        if self.period < 2:
            raise ValueError(f"[bench.comm] sums of {world} ranks aren't exact in {dtype}; use float32")

    def _table(self, rank):
        import torch

        return (torch.arange(self.period, device=self.device) + 37 * rank) % self.period

    @functools.cached_property
    def _sums(self):
        return sum(self._table(rank) for rank in range(self.world))

    def _tiled(self, table, count, start):
        table = table.roll(-(start % self.period)).to(self.dtype)
        return table.repeat(-(-count // self.period))[:count].contiguous()

    def of(self, rank, count, start=0):
        return self._tiled(self._table(rank), count, start)

    def sum(self, count, start=0):
        return self._tiled(self._sums, count, start)

    def joined(self, parts):
        """Of (rank, count, start), one after the other."""
        import torch

        return torch.cat([self.of(*part) for part in parts])
