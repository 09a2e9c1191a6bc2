"""The optimizer that `initialize` returns, and how a client's own torch optimizer is run on this rank's pieces."""
import collections
import weakref

import torch

from unshard.optim import FusedOptimizer
from unshard.parameter_offload import ParameterOffload

# Their update looks at a whole matrix: pieces of flattened parameters would silently give another result.
_NOT_ELEMENTWISE = {"Adafactor", "Muon", "Lamb", "LAMB", "Shampoo", "SOAP"}

_UNUSABLE = {"LBFGS": "needs a closure that runs the model again, which an engine's step can't do",
             "SparseAdam": "takes sparse gradients only, and the engine's are dense"}


class EngineOptimizer(torch.optim.Optimizer):
    """Shares the groups of the inner optimizer (`.optimizer`): true parameters, and hyperparameters that may be changed at any time;
    `step` and `zero_grad` are the engine's."""

    def __init__(self, engine, inner, core):
        # No super().__init__: the groups, defaults and hooks are the inner optimizer's own.
        self.optimizer = inner
        self._engine = weakref.ref(engine)
        self._core_optimizer = core
        self._zero_grad_profile_name = "Optimizer.zero_grad#EngineOptimizer.zero_grad"
        if engine.zero_optimization_stage() == 3:          # where libraries look for hooks
            self.parameter_offload = ParameterOffload(engine.module)

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups):
        self.optimizer.param_groups = groups

    @property
    def state(self):
        return self.optimizer.state

    @state.setter
    def state(self, state):
        self.optimizer.state = state

    @property
    def defaults(self):
        return self.optimizer.defaults

    def __getattr__(self, name):
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __deepcopy__(self, memo):
        raise TypeError("[optimizer] it can't be copied: its state belongs to the engine; keep state_dict() instead, or copy "
                        "optimizer.optimizer")

    def __getstate__(self):
        return {"param_groups": self.param_groups, "state": self.state, "defaults": self.defaults}

    @property
    def engine(self):
        engine = self._engine()
        if engine is None:
            raise RuntimeError("[optimizer] its engine is gone")
        return engine

    def step(self, closure=None):
        """As engine.step()."""
        if closure is not None:
            raise ValueError("[optimizer.step] closures aren't supported: the gradients are the engine's; call engine.backward() first")
        self.engine.step()

    def zero_grad(self, set_to_none=True):
        """Drop the gradients gathered so far."""
        self.engine.zero_grad()

    def add_param_group(self, param_group):
        raise NotImplementedError("[optimizer.add_param_group] parameters are laid out when the engine starts; give all groups to "
                                  "initialize()")

    @property
    def loss_scale(self):
        return self.engine._core.loss_scale()

    cur_scale = loss_scale

    @property
    def overflow(self):
        return self.engine._core.overflow()

    # ---- this rank's state ----------------------------------------------------------------------------------------------------------
    def _pieces(self):
        """(name, id) of every parameter in a group."""
        names = self.engine._names
        return [(names[p], self.engine._ids[names[p]]) for g in self.param_groups for p in g["params"] if p in names]

    def _domain(self, id):
        """An empty tensor as long as what this rank updates of a parameter: all of it at stage 0, else its piece."""
        if self.engine.zero_optimization_stage() == 0:
            return torch.empty(self.engine._store.info(id)["numel"])
        return torch.empty(self.engine._core.local_fp32_param(id).numel())

    @torch.no_grad()
    def state_dict(self):
        """What this rank updates: flat pieces by parameter name, the groups' hyperparameters, the loss scale."""
        core, engine = self._core_optimizer, self.engine
        whole = engine.zero_optimization_stage() == 0
        state = {}
        for name, id in self._pieces():
            pieces = {key: core.state(id, key, self._domain(id)) for key in core.state_names()}
            master = engine._core.full_fp32_param(id) if whole else engine._core.local_fp32_param(id).clone()
            state[name] = {"step": core.step_count(id), "fp32": master, **{k: v.clone() for k, v in pieces.items() if v is not None}}
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        return {"state": state, "param_groups": groups, "loss_scale": self.loss_scale, "overflow": self.overflow}

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Back to a state that state_dict() gave on this rank; all ranks call."""
        core, engine, ids = self._core_optimizer, self.engine, dict(self._pieces())
        lacking = [key for key in ("state", "param_groups") if not isinstance(state_dict, dict) or key not in state_dict]
        if lacking:
            raise ValueError(f"[optimizer.load_state_dict] this isn't what state_dict() gave: it has no '{lacking[0]}'")
        missing = sorted(set(ids) - set(state_dict["state"]))
        if missing:
            raise ValueError(f"[optimizer.load_state_dict] the state has nothing for {missing[:3]}; it is of another model")
        for name, pieces in state_dict["state"].items():
            id = ids[name]
            if engine.zero_optimization_stage() == 0:
                engine._core.set_full_fp32_param(id, pieces["fp32"])
            else:
                engine._set_local_fp32(id, pieces["fp32"])
            core.set_step_count(id, int(pieces["step"]))
            for key in pieces.keys() - {"step", "fp32"}:
                core.state(id, key, self._domain(id)).copy_(pieces[key])
        self.load_groups(state_dict["param_groups"])

    def load_groups(self, groups):
        """Hyperparameters of saved groups."""
        for group, saved in zip(self.param_groups, groups):
            group.update({k: v for k, v in saved.items() if k != "params"})

    # ---- for the engine -------------------------------------------------------------------------------------------------------------
    def run_hooks(self, when):
        """Step hooks that users registered on an optimizer which the engine runs itself ("pre" or "post")."""
        if isinstance(self.optimizer, FusedOptimizer):
            for hook in list(getattr(self.optimizer, f"_optimizer_step_{when}_hooks").values()):
                hook(self.optimizer, (), {})

    def mark_stepped(self):
        """torch's schedulers look at this mark to warn of a wrong order of calls."""
        self._opt_called = self.optimizer._opt_called = True


def refuse_pieces(kind, stage, world_size):
    """An optimizer of whole matrices where every rank has pieces only; found before the engine is made."""
    if kind in _NOT_ELEMENTWISE and stage > 0 and world_size > 1:
        raise _needs_whole(kind)


def _needs_whole(kind):
    return ValueError(f"[optimizer] {kind} looks at whole matrices, but each rank updates a flat piece: its result would differ from the "
                      "dense one. Use an element-wise optimizer, or zero stage 0")


class ClientOptimizer:
    """Runs a torch optimizer of the user's on flat pieces: its groups hold the pieces while it steps, and the user's parameters otherwise.

    The C++ engine calls these methods (see src/python/python_optimizer.h).
    """

    def __init__(self, client):
        why = _UNUSABLE.get(type(client).__name__)
        if why:
            raise ValueError(f"[optimizer] {type(client).__name__} {why}; use another optimizer")
        self.client = client
        self.type = type(client).__name__
        self._states = collections.defaultdict(dict)      # parameter id -> the client's state of its piece
        self._restored = collections.defaultdict(dict)    # the same, loaded before the client made any
        self._expected = []
        self._extra = {}                                  # the same for what isn't one value an element
        self._steps = collections.Counter()
        self._numels = {}                                 # parameter id -> elements of its piece
        self._parameters = {}                             # parameter id -> (the user's parameter, is its piece the whole of it)

    def bind(self, ids):
        """`ids`: {parameter: id}; called once the engine knows them."""
        self._parameters = {id: p for p, id in ids.items()}

    def prepare(self, items):
        if self.type not in _NOT_ELEMENTWISE:
            return
        for id, _, param, _, _ in items:
            p = self._parameters.get(id)
            if p is not None and p.numel() != param.numel():
                raise _needs_whole(self.type)

    @torch.no_grad()
    def step(self, items, scale):
        self.prepare(items)
        groups = [[] for _ in self.client.param_groups]
        pieces, casts = {}, []
        for id, group, param, master, grad in items:
            if param.numel() == 0:
                self._steps[id] += 1
                continue
            piece = param if master is None else _refreshed(master, param)
            gradient = grad.to(piece.dtype) if scale == 1 else (grad * scale).to(piece.dtype)
            if master is not None:
                casts.append((param, piece))
            shape = self._shape(id, piece)
            piece = piece.view(shape)
            piece.grad = gradient.view(shape)
            self._numels[id] = piece.numel()
            self._restore(id, piece)
            self._steps[id] += 1
            pieces[id] = piece
            groups[group].append(piece)
        self._run(groups, pieces)
        for param, master in casts:
            param.copy_(master)

    def _shape(self, id, piece):
        """A piece that is the whole parameter keeps its shape, so that shape-dependent optimizers are right too."""
        p = self._parameters.get(id)
        return p.shape if p is not None and p.numel() == piece.numel() and p.is_contiguous() else piece.shape

    def _run(self, groups, pieces):
        client = self.client
        own_params, own_state = [g["params"] for g in client.param_groups], client.state
        client.state = collections.defaultdict(dict, {piece: self._states[id] for id, piece in pieces.items()})
        for group, members in zip(client.param_groups, groups):
            group["params"] = members
        try:
            client.step()
        finally:
            for id, piece in pieces.items():
                if piece in client.state:
                    self._states[id] = client.state[piece]
                piece.grad = None
            for group, params in zip(client.param_groups, own_params):
                group["params"] = params
            client.state = own_state
        for id in pieces:
            if id in self._parameters:
                client.state[self._parameters[id]] = self._states[id]

    # ---- state, by parameter id -----------------------------------------------------------------------------------------------------
    def _is_piece(self, id, value):
        """A state with a value for each element that this rank updates."""
        return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == self._numels.get(id, value.numel())

    def extra_state(self, ids):
        """{parameter name: state that isn't one value an element}: scalars (NAdam's mu_product), rows and columns of whole matrices."""
        extra = {}
        for name, id in ids.items():
            found = {k: v for k, v in self._states.get(id, {}).items() if k != "step" and not self._is_piece(id, v)}
            if found:
                extra[name] = found
        return extra

    def load_extra_state(self, extra, ids):
        """Taken over with the rest at the client's next step."""
        for name, found in extra.items():
            if name not in ids:
                continue
            id = ids[name]
            state = self._states[id] if self._states.get(id) else self._extra.setdefault(id, {})
            state.update({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in found.items()})

    def expect(self, names):
        """States that a saved engine had, about to be loaded."""
        self._expected = list(names)

    def state_names(self):
        names = list(self._expected)
        for id, state in self._states.items():
            names += [k for k, v in state.items() if k not in names and self._is_piece(id, v)]
        return names

    def state(self, id, name, like):
        """The flat state; zeros for one that the client has not made yet, which it finds at its next step when a step count comes too."""
        value = self._states[id].get(name) if id in self._states else None
        if self._is_piece(id, value):
            return value.view(-1)
        names = self.state_names()
        if names and name not in names:
            return None
        return self._restored[id].setdefault(name, torch.zeros(like.numel(), dtype=torch.float32, device=like.device))

    def step_count(self, id):
        step = self._states[id].get("step") if id in self._states else None
        return self._steps[id] if step is None else int(step)

    def set_step_count(self, id, steps):
        self._steps[id] = steps
        if "step" in self._states.get(id, ()):
            old = self._states[id]["step"]
            self._states[id]["step"] = torch.full_like(old, steps) if isinstance(old, torch.Tensor) else steps

    def _restore(self, id, piece):
        """State that was loaded before the client made its own."""
        restored, extra = self._restored.pop(id, {}), self._extra.pop(id, {})
        if (restored or extra) and not self._states.get(id) and self._steps[id] > 0:
            self._states[id] = {"step": torch.tensor(float(self._steps[id])), **{k: v.view(piece.shape) for k, v in restored.items()},
                                **extra}

    def state_bytes(self):
        return sum(v.numel() * v.element_size() for s in self._states.values() for v in s.values() if isinstance(v, torch.Tensor))


def _refreshed(master, param):
    """The master weights, with what the user wrote into the 16-bit parameter since the last update taken over."""
    cast = master.to(param.dtype)
    if not torch.equal(cast, param):
        edited = cast != param
        master[edited] = param[edited].to(master.dtype)
    return master
