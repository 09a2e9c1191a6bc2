"""Activation checkpointing with DeepSpeed's switches, over torch's own: it works on partitioned parameters as it is."""
import contextlib
import functools
import time
from dataclasses import dataclass, fields, replace

import torch
import torch.utils.checkpoint

from unshard.config import load_config_dict
from unshard.loggers import logger
from unshard.rng_states import RngStates


@dataclass(frozen=True)
class Switches:
    """As the JSON's section activation_checkpointing. Those that split activations over model-parallel ranks, of which there is one, and
    that order memory, which torch's allocator does, change nothing."""
    partition_activations: bool = False
    contiguous_memory_optimization: bool = False
    number_checkpoints: int | None = None
    cpu_checkpointing: bool = False
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False


class ActivationCheckpointing:
    """`checkpoint(function, *args)` with what `configure` set, and the random states that recomputation must find again."""

    def __init__(self):
        self.rng_states = RngStates()
        self.reset()

    def reset(self):
        """As before configure()."""
        self.switches, self.configured = Switches(), False

    def configure(self, config=None, **given):
        """`config`: a DeepSpeed JSON (dict or path) whose section counts; `given`: switches that go before it, None: not given."""
        section = {} if config is None else load_config_dict(config).get("activation_checkpointing") or {}
        known = {field.name for field in fields(Switches)}
        values = {**{k: v for k, v in section.items() if k in known and v != "auto"}, **{k: v for k, v in given.items() if v is not None}}
        self.switch(Switches(), **values)

    def switch(self, before=None, **values):
        """Set some of the switches, the others as `before` (default: as they are)."""
        switches = replace(self.switches if before is None else before, **values)
        if switches.contiguous_memory_optimization and not (switches.partition_activations and switches.number_checkpoints):
            raise ValueError("[checkpointing.configure] contiguous checkpointing needs partition_activations and the number of "
                             "checkpoints; give both, or leave it out")
        self.switches, self.configured = switches, True

    def checkpoint(self, function, *args, use_reentrant=True, **keywords):
        """Run `function(*args, **keywords)` keeping its inputs only; what lies between is computed again in backward."""
        run = self._with_same_randomness(functools.partial(function, **keywords) if keywords else function)
        if self.switches.profile:
            run = _timed(run, getattr(function, "__qualname__", type(function).__name__))
        if self.switches.cpu_checkpointing:
            # The reentrant form keeps its inputs as saved tensors, which the hook moves.
            with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
                return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=True)
        return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant)

    def _with_same_randomness(self, function):
        """torch puts its own generators back for the second run; this does it for the named ones."""
        if not self.rng_states.get_states():
            return function
        before = self.rng_states.get_states()
        runs = []

        def run(*args):
            again = bool(runs)
            runs.append(True)
            with self._at(before) if again else contextlib.nullcontext():
                return function(*args)
        return run

    @contextlib.contextmanager
    def _at(self, states):
        now = self.rng_states.get_states()
        self.rng_states.set_states(states)
        try:
            yield
        finally:
            self.rng_states.set_states(now)


def _timed(function, name):
    runs = []

    def run(*args):
        what = "recomputation" if runs else "forward"
        runs.append(what)
        start = time.perf_counter()
        out = function(*args)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        logger.info(f"[checkpointing] {name}: {what} {1e3 * (time.perf_counter() - start):.2f} ms")
        return out
    return run
