"""The engine's fused optimizers as torch optimizers: usable alone on plain tensors, or passed to `initialize`, which then runs them on
each rank's shards."""
import inspect
import json

import torch

from unshard.core import ConfigError, _core


_NUMBERS = ("lr", "eps", "weight_decay", "momentum", "dampening", "lr_decay", "min_coeff", "max_coeff")
_SWITCHES = ("nesterov", "bias_correction", "maximize", "eps_inside_sqrt")


def group_options(group):
    """A torch parameter group's hyperparameters in the engine's form; keys of other meaning (a pair of eps, say) are the client's own."""
    options = _core.GroupOptions()
    for key in _NUMBERS:
        if _is_number(group.get(key)):
            setattr(options, key, float(group[key]))
    for key in _SWITCHES:
        if isinstance(group.get(key), bool):
            setattr(options, key, group[key])
    betas = group.get("betas")
    if isinstance(betas, (tuple, list)) and len(betas) >= 2 and all(_is_number(b) for b in betas[:2]):
        options.beta1, options.beta2 = float(betas[0]), float(betas[1])
    if _is_number(group.get("initial_accumulator_value")):
        options.initial_accumulator = float(group["initial_accumulator_value"])
    return options


def _is_number(value):
    return isinstance(value, (int, float)) or isinstance(value, torch.Tensor) and value.numel() == 1


class FusedOptimizer(torch.optim.Optimizer):
    """Base: one fused pass over a parameter's memory by the engine's kernels. `kind` and `decoupled` name the formula."""

    kind = ""
    decoupled = True

    def __init__(self, params, defaults):
        # torch wraps this and add_param_group so that their first call imports its compiler, which takes a second or more.
        inspect.unwrap(torch.optim.Optimizer.__init__)(self, params, defaults)
        self._make()

    def add_param_group(self, param_group):
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)

    def _make(self):
        self._kernels = _core.make_optimizer(self.kind, self.decoupled)
        self._ids = {}                        # parameter -> its number in the kernels' state

    def core_optimizer(self):
        """A fresh one of the same kind, for an engine."""
        return _core.make_optimizer(self.kind, self.decoupled)

    @torch.no_grad()
    def step(self, closure=None):
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        items, copies = [], []
        for index, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise ValueError(f"[optim.{type(self).__name__}] sparse gradients aren't supported; use sparse=False")
                flat = p.detach().contiguous().view(-1)
                if not p.is_contiguous():
                    copies.append((p, flat))
                master = None if p.dtype == torch.float32 else flat.float()
                items.append((self._ids.setdefault(p, len(self._ids)), index, flat, master, p.grad.detach().contiguous().view(-1)))
        if items:
            self._kernels.step(items, [group_options(g) for g in self.param_groups])
        for p, flat in copies:
            p.copy_(flat.view(p.shape))
        self._show_state()
        return loss

    def _flat_like(self, p):
        return torch.empty(0, dtype=torch.float32, device=p.device).new_empty(p.numel())

    def _show_state(self):
        """`state` holds views of the kernels' memory, under the names torch's optimizers use."""
        for p, id in self._ids.items():
            state = self.state[p]
            state["step"] = self._kernels.step_count(id)
            for name in self._kernels.state_names():
                if name not in state:
                    state[name] = self._kernels.state(id, name, self._flat_like(p)).view(p.shape)

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self._make()
        for p, state in list(self.state.items()):
            id = self._ids.setdefault(p, len(self._ids))
            for name in self._kernels.state_names():
                if name in state:
                    self._kernels.state(id, name, self._flat_like(p)).copy_(state.pop(name).reshape(-1))
            self._kernels.set_step_count(id, int(state["step"]))
        self._show_state()


class Adam(FusedOptimizer):
    """Adam; `adam_w_mode` (the default) decouples the weight decay, which is AdamW."""

    kind = "adam"

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, bias_correction=True, adam_w_mode=True,
                 amsgrad=False, maximize=False):
        _refuse(self, amsgrad=amsgrad)
        self.decoupled = bool(adam_w_mode)
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay,
                                  "bias_correction": bias_correction, "maximize": maximize})


class AdamW(Adam):
    """Adam with decoupled weight decay."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, bias_correction=True, amsgrad=False,
                 maximize=False):
        super().__init__(params, lr, betas, eps, weight_decay, bias_correction, True, amsgrad, maximize)


class SGD(FusedOptimizer):
    """Stochastic gradient descent, with momentum as torch has it."""

    kind = "sgd"

    def __init__(self, params, lr=1e-3, momentum=0, dampening=0, weight_decay=0, nesterov=False, maximize=False):
        super().__init__(params, {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
                                  "nesterov": nesterov, "maximize": maximize})


class Adagrad(FusedOptimizer):
    """Adagrad as torch has it."""

    kind = "adagrad"

    def __init__(self, params, lr=1e-2, lr_decay=0, weight_decay=0, initial_accumulator_value=0, eps=1e-10, maximize=False):
        super().__init__(params, {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay,
                                  "initial_accumulator_value": initial_accumulator_value, "eps": eps, "maximize": maximize})


class Lion(FusedOptimizer):
    """Lion: the sign of an interpolated momentum, decoupled weight decay."""

    kind = "lion"

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0, maximize=False):
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay, "maximize": maximize})


class Lamb(FusedOptimizer):
    """LAMB: Adam's direction with weight decay, times the ratio of the norms of a parameter and of its direction, kept within
    min_coeff and max_coeff. Under ZeRO the norms are those of whole parameters."""

    kind = "lamb"

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, bias_correction=True, eps_inside_sqrt=False,
                 min_coeff=0.01, max_coeff=10.0, amsgrad=False, maximize=False):
        _refuse(self, amsgrad=amsgrad)
        if not 0 <= min_coeff <= max_coeff:
            raise ValueError(f"[optim.Lamb] min_coeff={min_coeff!r} and max_coeff={max_coeff!r}; wanted 0 <= min_coeff <= max_coeff")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay,
                                  "bias_correction": bias_correction, "eps_inside_sqrt": eps_inside_sqrt, "min_coeff": min_coeff,
                                  "max_coeff": max_coeff, "maximize": maximize})


def _refuse(optimizer, **switches):
    for name, value in switches.items():
        if value:
            raise ValueError(f"[optim.{type(optimizer).__name__}] {name}={value!r} isn't supported; leave it out")


# ---- by name, from the JSON --------------------------------------------------------------------------------------------------------
_BY_KIND = {"adam": Adam, "adamw": AdamW, "sgd": SGD, "adagrad": Adagrad, "lion": Lion, "lamb": Lamb}
# Keys of the JSON that choose an implementation in DeepSpeed and change nothing here.
_CHOICES = ("torch_adam", "adam_w_mode", "set_grad_none", "fp32_optimizer_states", "fused", "foreach", "differentiable", "capturable",
            "amsgrad")


def from_config(optimizer, params):
    """The JSON's optimizer over `params` (parameters or group dicts): ours, or a class of torch.optim. None when none is named."""
    if not optimizer.type:
        return None
    given = json.loads(optimizer.params_json)
    known = _core.is_known_optimizer(optimizer.type)
    if known and not given.get("amsgrad"):
        kind, options = _core.parse_optimizer(optimizer.type, optimizer.params_json)
        keywords = {k: v for k, v in given.items() if k not in _CHOICES}
        if kind in ("adam", "adamw"):
            return Adam(params, adam_w_mode=kind == "adamw", **{"weight_decay": options.weight_decay, **keywords})
        return _BY_KIND[kind](params, **keywords)
    wanted = optimizer.type.lower()
    if known and wanted == "adam" and given.get("adam_w_mode", True):
        wanted = "adamw"                                     # amsgrad, which the kernels don't have, with torch_adam
    names = {n.lower(): n for n in dir(torch.optim) if isinstance(getattr(torch.optim, n), type)}
    kind = getattr(torch.optim, names.get(wanted, optimizer.type), None)
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        raise ConfigError(f"[config] optimizer.type '{optimizer.type}' is neither one of {', '.join(sorted(_BY_KIND))} nor a class of "
                          "torch.optim")
    try:
        return kind(params, **{k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if k not in _CHOICES[:4]})
    except TypeError as error:
        raise ConfigError(f"[config] optimizer.params of {optimizer.type}: {error}") from None
