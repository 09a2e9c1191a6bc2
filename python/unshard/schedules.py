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
            if momentum is None:
                continue
            if "betas" in group:
                group["betas"] = (momentum, group["betas"][1] if second_beta is None else second_beta)
            elif "momentum" in group:
                group["momentum"] = momentum
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
        self.last_batch_iteration = state_dict["last_batch_iteration"]
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
    if scheduler.type in SCHEDULES:
        kind = SCHEDULES[scheduler.type]
    else:
        from torch.optim import lr_scheduler
        kind = getattr(lr_scheduler, scheduler.type, None)
        if not inspect.isclass(kind):
            raise ConfigError(f"[config] scheduler.type '{scheduler.type}' is neither one of {', '.join(SCHEDULES)} nor a class of "
                              "torch.optim.lr_scheduler")
    try:
        return kind(optimizer, **params)
    except TypeError as error:
        raise ConfigError(f"[config] scheduler.params of {scheduler.type}: {error}") from None
