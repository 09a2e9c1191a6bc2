"""Learning-rate schedules: thin torch-like faces over the C++ formulas, usable with any torch optimizer or by name from the JSON."""
import inspect
import json

from unshard.core import ConfigError, _core


class Schedule:
    """Sets the learning rate (and momentum) of every group as a function of the number of steps.

    `last_batch_iteration` is that number minus one; -1 is before the first step.
    """

    def __init__(self, optimizer, last_batch_iteration=-1, **params):
        self.optimizer = getattr(optimizer, "optimizer", optimizer)
        groups = self.optimizer.param_groups
        self.base_lrs = [float(g.get("initial_lr", g["lr"])) for g in groups]
        given = {k: v for k, v in params.items() if v is not None}
        self._schedule = _core.make_lr_schedule(type(self).__name__, json.dumps(given), self.base_lrs[0], len(groups))
        self._whole_numbers = {float(v): v for v in given.values() if type(v) is int}
        self.last_batch_iteration = last_batch_iteration
        self._last_lr = [g["lr"] for g in groups]
        if last_batch_iteration == -1:          # a run that goes on makes its first update with what the optimizer has
            self._apply()

    def _values(self):
        values = [self._schedule.value(self.last_batch_iteration + 1, i, base) for i, base in enumerate(self.base_lrs)]
        if self.last_batch_iteration < 0:       # before the first step the rate is the user's own number, a whole one too
            values = [(self._whole_numbers.get(lr, lr), *momenta) for lr, *momenta in values]
        return values

    def _apply(self):
        for group, (lr, momentum, second_beta) in zip(self.optimizer.param_groups, self._values()):
            if lr is not None:
                group["lr"] = lr
            if momentum is not None and "betas" in group:
                group["betas"] = (momentum, second_beta)
        self._last_lr = [g["lr"] for g in self.optimizer.param_groups]

    def get_lr(self):
        """What the schedule says now, one value a group."""
        return [now if lr is None else lr for (lr, _, _), now in zip(self._values(), self._last_lr)]

    def get_last_lr(self):
        """What was last set, one value a group."""
        return list(self._last_lr)

    def step(self, last_batch_iteration=None):
        """One update was made (or `last_batch_iteration` + 1 of them)."""
        self.last_batch_iteration = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self._apply()

    def state_dict(self):
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict):
        """Back to that step. The optimizer's rates are left to its own state, as torch's schedules do; apply() sets them."""
        self.last_batch_iteration = state_dict["last_batch_iteration"]
        self._last_lr = self.get_lr()

    def apply(self):
        """Give the optimizer what the schedule says now."""
        self._apply()


class WarmupLR(Schedule):
    """From warmup_min_lr to warmup_max_lr (default: the optimizer's) over warmup_num_steps, "log" or "linear"; then constant."""

    def __init__(self, optimizer, warmup_min_lr=0.0, warmup_max_lr=None, warmup_num_steps=1000, warmup_type="log",
                 last_batch_iteration=-1):
        super().__init__(optimizer, last_batch_iteration, warmup_min_lr=warmup_min_lr, warmup_max_lr=warmup_max_lr,
                         warmup_num_steps=warmup_num_steps, warmup_type=warmup_type)


class WarmupDecayLR(Schedule):
    """WarmupLR, then linearly to zero at total_num_steps."""

    def __init__(self, optimizer, total_num_steps, warmup_min_lr=0.0, warmup_max_lr=0.001, warmup_num_steps=1000, warmup_type="log",
                 last_batch_iteration=-1):
        super().__init__(optimizer, last_batch_iteration, total_num_steps=total_num_steps, warmup_min_lr=warmup_min_lr,
                         warmup_max_lr=warmup_max_lr, warmup_num_steps=warmup_num_steps, warmup_type=warmup_type)


class WarmupCosineLR(Schedule):
    """A factor on the optimizer's rate: warm-up from warmup_min_ratio to 1, then a cosine to cos_min_ratio at total_num_steps."""

    def __init__(self, optimizer, total_num_steps, warmup_min_ratio=0.0, warmup_num_steps=1000, cos_min_ratio=0.0001, warmup_type="log",
                 last_batch_iteration=-1):
        super().__init__(optimizer, last_batch_iteration, total_num_steps=total_num_steps, warmup_min_ratio=warmup_min_ratio,
                         warmup_num_steps=warmup_num_steps, cos_min_ratio=cos_min_ratio, warmup_type=warmup_type)


class OneCycle(Schedule):
    """Up and down once, momentum the other way round, then a decay."""

    def __init__(self, optimizer, cycle_min_lr, cycle_max_lr, decay_lr_rate=0.0, cycle_first_step_size=2000, cycle_second_step_size=None,
                 cycle_first_stair_count=0, cycle_second_stair_count=None, decay_step_size=0, cycle_momentum=True, cycle_min_mom=0.8,
                 cycle_max_mom=0.9, decay_mom_rate=0.0, last_batch_iteration=-1):
        super().__init__(optimizer, last_batch_iteration, cycle_min_lr=cycle_min_lr, cycle_max_lr=cycle_max_lr,
                         decay_lr_rate=decay_lr_rate, cycle_first_step_size=cycle_first_step_size,
                         cycle_second_step_size=cycle_second_step_size, cycle_first_stair_count=cycle_first_stair_count,
                         cycle_second_stair_count=cycle_second_stair_count, decay_step_size=decay_step_size,
                         cycle_momentum=cycle_momentum, cycle_min_mom=cycle_min_mom, cycle_max_mom=cycle_max_mom,
                         decay_mom_rate=decay_mom_rate)

    def get_mom(self):
        """The betas that the schedule says now, one pair a group; None where it leaves them alone."""
        if not all("betas" in group for group in self.optimizer.param_groups):
            return None
        pairs = [(momentum, second_beta) for _, momentum, second_beta in self._values() if momentum is not None]
        return pairs or None


class LRRangeTest(Schedule):
    """Grows from lr_range_test_min_lr, to find a good rate."""

    def __init__(self, optimizer, lr_range_test_min_lr=1e-3, lr_range_test_step_size=2000, lr_range_test_step_rate=1.0,
                 lr_range_test_staircase=False, last_batch_iteration=-1):
        super().__init__(optimizer, last_batch_iteration, lr_range_test_min_lr=lr_range_test_min_lr,
                         lr_range_test_step_size=lr_range_test_step_size, lr_range_test_step_rate=lr_range_test_step_rate,
                         lr_range_test_staircase=lr_range_test_staircase)


SCHEDULES = {c.__name__: c for c in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}
VALID_LR_SCHEDULES = list(SCHEDULES)


def from_config(scheduler, optimizer):
    """The JSON's scheduler over `optimizer`: one of ours, or a class of torch.optim.lr_scheduler by name. None when none is named."""
    if not scheduler.type:
        return None
    params = json.loads(scheduler.params_json)
    if scheduler.type not in SCHEDULES:
        return _of_torch(scheduler.type, params, optimizer)
    try:
        return SCHEDULES[scheduler.type](optimizer, **params)
    except TypeError as error:
        raise ConfigError(f"[config] scheduler.params of {scheduler.type}: {error}") from None


def _of_torch(name, params, optimizer):
    """torch's class of that name, tried before on another optimizer: torch looks at much of what it is given only when it steps."""
    from torch.optim import lr_scheduler

    kind = getattr(lr_scheduler, name, None)
    base = lr_scheduler.LRScheduler
    if not inspect.isclass(kind) or not issubclass(kind, (base, lr_scheduler.ReduceLROnPlateau)):
        raise ConfigError(f"[config] scheduler.type '{name}' is neither one of {', '.join(SCHEDULES)} nor a schedule of "
                          "torch.optim.lr_scheduler")
    if kind is lr_scheduler.ReduceLROnPlateau:
        raise ConfigError("[config] scheduler.type 'ReduceLROnPlateau' needs a metric at each step, which the engine doesn't have; leave "
                          "it out, make it of the engine's optimizer, and call its step(metric) yourself after engine.step()")
    if kind is base or base in kind.__bases__ and kind.__name__ == "_LRScheduler":
        raise ConfigError(f"[config] scheduler.type '{name}' is the base of torch's schedules, not one of them; name one, such as StepLR")
    _check_params(name, kind, params)
    try:
        _try(kind, params, [float(group["lr"]) for group in optimizer.param_groups])
        return kind(optimizer, **params)
    except Exception as error:                                   # whatever torch makes of values that it didn't expect
        given = ", ".join(f"{key} = {json.dumps(value)}" for key, value in params.items())
        raise ConfigError(f"[config] scheduler.params of {name} ({given or 'none'}): {error}") from None


_PLAIN = {"int": "a whole number", "float": "a number", "bool": "true or false"}


def _check_params(name, kind, params):
    """The keys, and the values of those that torch annotates with a plain type."""
    known = inspect.signature(kind).parameters
    for key, value in params.items():
        if key not in known or key == "optimizer":
            accepted = ", ".join(k for k in known if k != "optimizer")
            raise ConfigError(f"[config] scheduler.params.{key}: {name} has no such parameter; it has {accepted}")
        annotation = known[key].annotation
        wanted = annotation.__name__ if inspect.isclass(annotation) else str(annotation)
        if wanted.endswith(("Iterable[int]", "list[int]")) and not (isinstance(value, list) and all(_is_of("int", v) for v in value)):
            raise ConfigError(f"[config] scheduler.params.{key} of {name} must be a list of whole numbers, got {json.dumps(value)}")
        if wanted in _PLAIN and not _is_of(wanted, value):
            raise ConfigError(f"[config] scheduler.params.{key} of {name} must be {_PLAIN[wanted]}, got {json.dumps(value)}")


def _is_of(wanted, value):
    if wanted == "bool" or isinstance(value, bool):
        return wanted == "bool" and isinstance(value, bool)
    return isinstance(value, int) or isinstance(value, float) and (wanted == "float" or value.is_integer())


def _try(kind, params, rates):
    import torch

    from unshard.optim import SGD

    trial = SGD([{"params": [torch.zeros(1)], "lr": lr} for lr in rates], momentum=0.9)
    schedule = kind(trial, **params)
    trial.step()
    schedule.step()
