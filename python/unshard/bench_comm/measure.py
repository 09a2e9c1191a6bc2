"""One row: an operation at one size, checked and timed."""
import dataclasses
import json
import statistics
import time

from unshard.bench_comm.operations import Values

WARM_UP = 3
AUTO_SECONDS = 0.2
AUTO_LEAST, AUTO_MOST = 5, 2000


@dataclasses.dataclass
class Row:
    operation: str
    bytes: int
    count: int
    dtype: str
    iterations: int
    time_us: float                # median over iterations on each rank, then the slowest rank's
    algbw_GBps: float
    busbw_GBps: float
    wrong: int                    # elements, of all ranks, in the two checked calls


def count_of(operation, nbytes, world, element_size):
    """Elements of about `nbytes`: at least one, one a rank where the tensor is split."""
    parts = world if operation.splits else 1
    return max(parts, nbytes // element_size // parts * parts)


def measure(comm, operation, nbytes, dtype, device="cpu", iterations=None):
    """Collective; the same row on all ranks. `iterations=None`: as many as take about AUTO_SECONDS."""
    import torch

    world, element_size = comm.world_size, torch.empty((), dtype=dtype).element_size()
    count = count_of(operation, nbytes, world, element_size)
    values = Values(world, dtype, operation.sums, device)
    try:
        buffers = Buffers(operation, values, comm.rank, world, count)
    except (RuntimeError, MemoryError) as error:                 # torch's of the CPU is no class of its own
        raise ValueError(f"[bench.comm] {operation.name} of {nbytes} bytes: rank {comm.rank} can't make its tensors; give a smaller --max "
                         f"({str(error).splitlines()[0]})") from None
    wrong = checked_call(comm, operation, buffers)
    buffers.prepare_for_timing()
    seconds, done = timed(comm, operation, buffers, iterations, synchronise(device))
    wrong += checked_call(comm, operation, buffers)
    told = [json.loads(text) for text in comm.all_gather_strings(json.dumps([seconds, wrong]))]
    slowest = max(time for time, _ in told)
    algbw = count * element_size / slowest / 1e9
    return Row(operation.name, count * element_size, count, str(dtype).removeprefix("torch."), done, slowest * 1e6, algbw,
               algbw * operation.bus_factor(world), sum(bad for _, bad in told))


class Buffers:
    def __init__(self, operation, values, rank, world, count):
        import torch

        self._operation = operation
        self._given = operation.input(values, rank, world, count)
        self.expected = operation.expected(values, rank, world, count)
        self.input = self._given.clone() if operation.in_place else self._given
        self.output = self.input if operation.in_place else torch.empty_like(self.expected)

    def reset(self):
        """Nothing of the right result may be left of an earlier call."""
        if self._operation.in_place:
            self.input.copy_(self._given)
        else:
            self.output.fill_(float("nan"))

    def prepare_for_timing(self):
        if self._operation.in_place and self._operation.sums:
            self.input.zero_()                     # what is added up again and again must stay finite


def checked_call(comm, operation, buffers):
    """Wrong elements of this rank."""
    buffers.reset()
    operation.run(comm, buffers.output, buffers.input)
    return int((buffers.output != buffers.expected).sum())          # NaN differs from everything


def timed(comm, operation, buffers, iterations, finish):
    """(median seconds of this rank, iterations)"""
    def one():
        begin = time.perf_counter()
        operation.run(comm, buffers.output, buffers.input)
        finish()
        return time.perf_counter() - begin

    comm.barrier("bench.comm")
    warm = [one() for _ in range(WARM_UP)]
    if iterations is None:
        estimate = max(float(text) for text in comm.all_gather_strings(repr(min(warm))))
        iterations = max(AUTO_LEAST, min(AUTO_MOST, int(AUTO_SECONDS / max(estimate, 1e-7))))
    comm.barrier("bench.comm")
    return statistics.median(one() for _ in range(iterations)), iterations


def synchronise(device):
    import torch

    return torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
