"""Named states of the device's random generator, for code that draws under another seed for a while (dropout that differs between
model-parallel ranks)."""
import contextlib

import torch

MODEL_PARALLEL = "model-parallel-rng"
_TENSOR_PARALLEL_OFFSET = 2718          # Megatron's, which scripts rely on


def _get_state():
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _set_state(state):
    (torch.cuda.set_rng_state if torch.cuda.is_available() else torch.set_rng_state)(state)


def _seed(seed):
    (torch.cuda.manual_seed if torch.cuda.is_available() else torch.manual_seed)(seed)


class RngStates:
    """{name: state}"""

    def __init__(self):
        self.reset()

    def reset(self):
        self._states, self._seeds = {}, set()

    def get_states(self):
        """A copy."""
        return {name: state.clone() for name, state in self._states.items()}

    def set_states(self, states):
        self._states = {name: state.clone() for name, state in states.items()}

    def add(self, name, seed):
        """A state of that seed under a new name."""
        if seed in self._seeds:
            raise ValueError(f"[rng] seed {seed} is in use already; two names with one seed would draw the same numbers")
        if name in self._states:
            raise ValueError(f"[rng] there is a state named '{name}' already; reset() first, or take another name")
        current = _get_state()
        _seed(seed)
        self._states[name] = _get_state()
        self._seeds.add(seed)
        _set_state(current)

    @contextlib.contextmanager
    def fork(self, name=MODEL_PARALLEL):
        """Inside, numbers are drawn from that state, which goes on where it was left."""
        if name not in self._states:
            raise ValueError(f"[rng] there is no state named '{name}'; there are {sorted(self._states) or 'none'}: add(name, seed) first")
        outside = _get_state()
        _set_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _get_state()
            _set_state(outside)


def seed_for_model_parallelism(states, seed, model_parallel_rank=0):
    """`seed` for the default generator (the same on every model-parallel rank), and a state of its own for each of them."""
    states.reset()
    _seed(seed)
    states.add(MODEL_PARALLEL, seed + _TENSOR_PARALLEL_OFFSET + model_parallel_rank)
