"""Times and sizes of torch.distributed calls, by operation and message size."""
import functools
import sys
import time
from datetime import datetime

import torch
import torch.distributed as dist

from unshard.loggers import logger as _log

# What the algorithm moves and what each link carries, in units of the message: (algorithm, bus) as functions of the number of ranks.
_GATHERS = ("all_gather", "all_gather_into_tensor", "all_gather_coalesced", "reduce_scatter", "reduce_scatter_tensor")
_ALL_TO_ALL = ("all_to_all", "all_to_all_single")
_ALL_REDUCES = ("all_reduce", "all_reduce_coalesced", "inference_all_reduce")


def bandwidths(operation, message_bytes, milliseconds, world_size):
    """(algorithm bandwidth, bus bandwidth) in Gbit/s, with nccl-tests' factors."""
    share = (world_size - 1) / world_size
    if operation in _GATHERS:
        algorithm, bus = world_size, world_size * share
    elif operation in _ALL_TO_ALL:
        algorithm, bus = 1, share
    elif operation in _ALL_REDUCES:
        algorithm, bus = 2, 2 * share
    else:
        algorithm = bus = 1
    gbit_per_s = 8e-6 * message_bytes / max(milliseconds, 1e-9)
    return algorithm * gbit_per_s, bus * gbit_per_s


class CommsLogger:
    """Records calls that `recorded` wraps, while enabled. With async_op the time is that of the start alone."""

    def __init__(self):
        self.enabled = self.verbose = self.debug = False
        self.prof_all, self.prof_ops = True, []
        self._records = {}                         # name -> {message bytes -> [milliseconds]}

    def configure(self, enabled=None, prof_all=None, prof_ops=None, verbose=None, debug=None):
        """None: as it is."""
        given = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
        self.__dict__.update((name, value) for name, value in given.items() if value is not None)

    def wants(self, operation, asked=False):
        return self.enabled and (self.prof_all or asked or operation in self.prof_ops)

    def append(self, operation, name, milliseconds, message_bytes):
        self._records.setdefault(name, {}).setdefault(message_bytes, []).append(milliseconds)
        if self.verbose:
            algorithm, bus = bandwidths(operation, message_bytes, milliseconds, dist.get_world_size())
            _log.info(f"[comm] {name}: {readable(message_bytes)} in {milliseconds:.2f} ms, algorithm {algorithm:.2f} Gbit/s, bus {bus:.2f} "
                           "Gbit/s")

    def reset(self):
        self._records.clear()

    def has_data(self):
        return bool(self._records)

    def counts(self):
        """{name: number of calls}"""
        return {name: sum(map(len, sizes.values())) for name, sizes in self._records.items()}

    def summary(self, show_straggler=False):
        """{"summary": {name: {bytes: figures}}, "straggler_analysis": the same or None, "metadata": ...}. With `show_straggler` collective:
        a call's time on the fastest rank is communication, what this rank waited beyond it is the stragglers'."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        out = {"summary": {}, "straggler_analysis": {} if show_straggler else None,
               "metadata": {"world_size": world, "rank": dist.get_rank() if dist.is_initialized() else 0,
                            "timestamp": datetime.now().isoformat()}}
        for name, sizes in self._records.items():
            for size, times in sizes.items():
                rates = [bandwidths(name.split(" | ")[0], size, t, world) for t in times]
                what = {"count": len(times), "msg_size_bytes": size, "msg_size_str": readable(size)}
                out["summary"].setdefault(name, {})[size] = {
                    **what, "total_latency_ms": sum(times), "avg_latency_ms": sum(times) / len(times),
                    "tput_avg_gbps": sum(a for a, _ in rates) / len(rates), "busbw_avg_gbps": sum(b for _, b in rates) / len(rates)}
                if show_straggler:
                    fastest = torch.tensor(times, dtype=torch.float64)
                    dist.all_reduce(fastest, dist.ReduceOp.MIN)
                    waited = sum(times) - fastest.sum().item()
                    out["straggler_analysis"].setdefault(name, {})[size] = {
                        **what, "total_comm_lat_ms": fastest.sum().item(), "total_straggler_ms": waited,
                        "avg_comm_lat_ms": fastest.mean().item(), "avg_straggler_ms": waited / len(times)}
        return out


def show(summary):
    """A summary as text."""
    lines = [f"{'operation':<28}{'message':>12}{'calls':>8}{'total ms':>12}{'mean ms':>10}{'Gbit/s':>10}{'bus Gbit/s':>12}"]
    for name, sizes in summary["summary"].items():
        for row in sizes.values():
            lines.append(f"{name:<28}{row['msg_size_str']:>12}{row['count']:>8}{row['total_latency_ms']:>12.2f}{row['avg_latency_ms']:>10.2f}"
                         f"{row['tput_avg_gbps']:>10.2f}{row['busbw_avg_gbps']:>12.2f}")
    for name, sizes in (summary["straggler_analysis"] or {}).items():
        for row in sizes.values():
            lines.append(f"{name}, {row['msg_size_str']}: {row['total_comm_lat_ms']:.2f} ms of communication, "
                         f"{row['total_straggler_ms']:.2f} ms waited for stragglers")
    return "\n".join(lines)


def readable(count):
    """12.5 MB"""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1024 or unit == "GB":
            return f"{count:.2f} {unit}".replace(".00", "")
        count /= 1024


def recorded(logger, function, name=None):
    """`function` of torch.distributed, taking also `prof` (record this call), `log_name` and `debug` (the caller's name is added)."""
    name = name or function.__name__

    @functools.wraps(function)
    def call(*args, prof=False, log_name=None, debug=None, **keywords):
        if not logger.wants(name, prof):
            return function(*args, **keywords)
        label = log_name or name
        if logger.debug:
            label += f" | {sys._getframe(1).f_code.co_name}"
        start = time.perf_counter()
        out = function(*args, **keywords)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        logger.append(name, label, 1e3 * (time.perf_counter() - start), _bytes(message_of(name, (*args, *keywords.values()))))
        return out
    call.__name__ = name
    return call


def message_of(operation, values):
    """Of a call's arguments, what counts as the message: what one rank gives or gets of a gather or scatter, else the tensor."""
    second = operation.startswith("all_gather") or operation in _ALL_TO_ALL
    return values[1] if second and len(values) > 1 else values[0] if values else None


def _bytes(value):
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0
