"""Optimizers and schedules as Python users meet them: alone, passed in, named in the JSON; equal to torch's dense ones."""
import dense
import pytest
import torch
import torch.nn as nn
from ranks import run_ranks

import unshard
from unshard import optim, schedules


def parameters():
    g = torch.Generator().manual_seed(3)
    made = [torch.randn(5, 7, generator=g), torch.randn(33, generator=g), torch.randn(6, 4, generator=g).t()]
    return [nn.Parameter(t) for t in made]


def give_gradients(params, step):
    for i, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))


ALONE = [
    (lambda p: optim.AdamW(p, lr=0.05, weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1)),
    (lambda p: optim.Adam(p, lr=0.05, weight_decay=0.1, adam_w_mode=False), lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.1)),
    (lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True)),
    (lambda p: optim.Adagrad(p, lr=0.05, weight_decay=0.1), lambda p: torch.optim.Adagrad(p, lr=0.05, weight_decay=0.1)),
]


@pytest.mark.parametrize("make, reference", ALONE)
def test_alone_on_plain_tensors_equals_torch(make, reference):
    a, b = parameters(), parameters()
    mine, theirs = make(a), reference(b)
    for step in range(6):
        give_gradients(a, step), give_gradients(b, step)
        mine.step(), theirs.step()
    dense.close(a, b, 1e-6)


@pytest.mark.parametrize("make, reference", ALONE)
def test_state_dict_continues_exactly(make, reference):
    a = parameters()
    first = make(a)
    for step in range(3):
        give_gradients(a, step)
        first.step()
    b = [nn.Parameter(p.detach().clone()) for p in a]
    second = make(b)
    second.load_state_dict(first.state_dict())
    for step in range(3, 6):
        give_gradients(a, step), give_gradients(b, step)
        first.step(), second.step()
    assert all(torch.equal(x, y) for x, y in zip(a, b))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(8, 13), nn.Linear(13, 8)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def loss_of(model, rank, step):
    x, y = dense.batch(rank, step)
    return ((model(x) - y)**2).mean()


CLIENTS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1), "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01), "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01), "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
}


def client(rank, world, name, stage, as_function):
    model, twin = Net(), Net()
    made = CLIENTS[name] if as_function else CLIENTS[name](model.parameters())
    engine, optimizer, _, _ = unshard.initialize(model=model, optimizer=made, config={
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}})
    reference = CLIENTS[name](twin.parameters())
    assert isinstance(optimizer, torch.optim.Optimizer) and engine.client_optimizer is (None if as_function else made)
    for step in range(5):
        engine.backward(loss_of(engine, rank, step))
        engine.step()
        dense.accumulate_mean_gradient(twin, [lambda m, r=r: loss_of(m, r, step) for r in range(world)])
        reference.step()
        if step == 2:
            for o in (optimizer.optimizer, reference):        # the client's own groups are those that count
                o.param_groups[0]["lr"] *= 0.5
    dense.close(dense.weights(engine, model).values(), twin.parameters(), 1e-5)
    assert [p.shape for p in optimizer.param_groups[0]["params"]] == [p.shape for p in model.parameters()]
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("name", list(CLIENTS))
def test_any_element_wise_torch_optimizer_equals_its_dense_self(name, stage):
    client(0, 1, name, stage, False)


@pytest.mark.parametrize("name, stage, as_function", [("AdamW", 2, False), ("RMSprop", 3, True), ("NAdam", 1, False), ("SGD", 0, True)])
def test_client_optimizers_on_two_ranks(name, stage, as_function):
    run_ranks(2, client, name, stage, as_function)


def whole_matrices(rank, world, stage, by_name=False):
    model = Net()
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    given = {"config": {**config, "optimizer": {"type": "Adafactor", "params": {"lr": 0.01}}}} if by_name else {
        "config": config, "optimizer": torch.optim.Adafactor(model.parameters(), lr=0.01)}
    if stage > 0:
        with pytest.raises(ValueError, match="Adafactor looks at whole matrices"):
            unshard.initialize(model=model, **given)
        return
    engine, *_ = unshard.initialize(model=model, **given)
    engine.backward(loss_of(engine, rank, 0))
    engine.step()


@pytest.mark.parametrize("stage, by_name", [(0, False), (0, True), (1, True), (2, False), (3, False)])
def test_an_optimizer_of_whole_matrices_runs_on_whole_parameters_and_is_refused_at_the_start_on_pieces(stage, by_name):
    run_ranks(2, whole_matrices, stage, by_name)


def own_class(rank, world, stage, dtype):
    """A fused optimizer passed in runs as the engine's own."""
    model, twin = Net(), Net()
    groups = [{"params": [model.up.weight, model.down.weight], "weight_decay": 0.2},
              {"params": [model.up.bias, model.down.bias], "weight_decay": 0.0, "lr": 0.05}]
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    engine, optimizer, _, _ = unshard.initialize(model=model, optimizer=optim.AdamW(groups, lr=0.02), config=config)
    reference = torch.optim.AdamW([{"params": [twin.up.weight, twin.down.weight], "weight_decay": 0.2},
                                   {"params": [twin.up.bias, twin.down.bias], "weight_decay": 0.0, "lr": 0.05}], lr=0.02)
    for step in range(5):
        engine.backward(loss_of(engine, rank, step))
        engine.step()
        dense.accumulate_mean_gradient(twin, [lambda m, r=r: loss_of(m, r, step) for r in range(world)])
        reference.step()
    dense.close(dense.weights(engine, model).values(), twin.parameters(), 1e-5)
    saved = optimizer.state_dict()
    before = dense.hex_of(dense.weights(engine, model).values())
    engine.backward(loss_of(engine, rank, 5))
    engine.step()
    optimizer.load_state_dict(saved)
    assert dense.hex_of(dense.weights(engine, model).values()) == before
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameter_groups_and_the_optimizers_state_dict(stage):
    run_ranks(2, own_class, stage, "fp32")


def test_json_names_classes_of_torch_too():
    model = Net()
    engine, optimizer, _, scheduler = unshard.initialize(model=model, model_parameters=model.parameters(), config={
        "train_batch_size": 4, "optimizer": {"type": "NAdam", "params": {"lr": 0.01, "betas": [0.8, 0.9]}},
        "scheduler": {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}}})
    assert type(optimizer.optimizer) is torch.optim.NAdam and optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    rates = []
    for step in range(4):
        engine.backward(loss_of(engine, 0, step))
        engine.step()
        rates.append(engine.get_lr()[0])
    assert rates == pytest.approx([0.01, 0.005, 0.005, 0.0025])
    assert type(scheduler).__name__ == "StepLR"
    engine.destroy()


@pytest.mark.parametrize("kind, words", [("LBFGS", "needs a closure"), ("SparseAdam", "sparse gradients only")])
def test_optimizers_that_cant_be_run_are_refused_at_the_start(kind, words):
    model = Net()
    with pytest.raises(ValueError, match=f"{kind} .*{words}"):
        unshard.initialize(model=model, optimizer=getattr(torch.optim, kind)(model.parameters()), config={"train_batch_size": 4})


@pytest.mark.parametrize("type, params, words", [
    ("ReduceLROnPlateau", {}, "step.metric. yourself"), ("LRScheduler", {}, "base of torch's schedules"),
    ("_LRScheduler", {}, "base of torch's schedules"), ("Counter", {}, "nor a schedule of"),
    ("StepLR", {"step_size": "x"}, "step_size of StepLR must be a whole number"), ("StepLR", {"step_size": 0}, "step_size = 0"),
    ("StepLR", {"step_sise": 2}, "params.step_sise: StepLR has no such parameter; it has step_size"), ("StepLR", {}, "step_size"),
    ("ExponentialLR", {"gamma": None}, "gamma of ExponentialLR must be a number"), ("LambdaLR", {"lr_lambda": "x"}, "lr_lambda = \"x\""),
    ("MultiStepLR", {"milestones": ["x"]}, "milestones"), ("OneCycleLR", {"max_lr": 0.1}, "max_lr = 0.1")])
def test_a_schedule_of_torchs_that_couldnt_step_is_refused(type, params, words):
    model = Net()
    with pytest.raises(unshard.ConfigError, match=words):
        unshard.initialize(model=model, config={"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
                                                "scheduler": {"type": type, "params": params}})


def test_schedule_moves_on_applied_boundary_updates_only():
    model = Net()
    engine, optimizer, _, scheduler = unshard.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear"}}})
    seen = [scheduler.last_batch_iteration]
    for micro in range(6):
        loss = loss_of(engine, 0, micro)
        engine.backward(loss * float("inf") if micro == 3 else loss)
        engine.step()
        seen.append(scheduler.last_batch_iteration)
    assert seen == [-1, -1, 0, 0, 0, 0, 1] and engine.skipped_steps == 1
    engine.destroy()


@pytest.mark.parametrize("type, params, name, group", [
    ("Adam", {"torch_adam": True}, "adam", {"weight_decay": 0.01}), ("AdamW", {"torch_adam": True}, "adamw", {"weight_decay": 0.01}),
    ("Adam", {"torch_adam": True, "amsgrad": True}, "adam", {"weight_decay": 0.01, "amsgrad": True, "decoupled_weight_decay": True}),
    ("Adam", {"torch_adam": True, "adam_w_mode": False}, "adam", {"weight_decay": 0.0}), ("AdamW", {}, "adamw", {"weight_decay": 0.0}),
    ("AdamW", {"fp32_optimizer_states": False}, "adamw", {"weight_decay": 0.0}),
    ("SGD", {}, "SGD", {"momentum": 0, "dampening": 0, "weight_decay": 0}), ("Adagrad", {}, "adagrad", {"weight_decay": 0}),
    ("RMSprop", {}, "RMSprop", {"momentum": 0})])
def test_defaults_and_names_are_those_of_deepspeed(type, params, name, group):
    """Recorded from DeepSpeed 0.19.8; whole numbers stay whole."""
    engine, optimizer, _, _ = unshard.initialize(model=Net(), config={
        "train_batch_size": 4, "optimizer": {"type": type, "params": {"lr": 0.01, **params}}})
    found = optimizer.param_groups[0]
    assert engine.optimizer_name() == name and {k: found[k] for k in group} == group
    assert [found[k].__class__ for k in group] == [v.__class__ for v in group.values()]
    assert engine.get_mom() == [found.get("momentum", found.get("betas", 0.0))]
    engine.destroy()


def test_one_cycle_moves_betas_and_leaves_other_momenta_alone():
    """The values are DeepSpeed 0.19.8's."""
    cycle = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3}
    adam, sgd = torch.optim.AdamW(parameters(), lr=3e-3), torch.optim.SGD(parameters(), lr=0.1, momentum=0.5)
    with_betas, without = schedules.OneCycle(adam, **cycle), schedules.OneCycle(sgd, **cycle)
    assert with_betas.get_mom() == [(0.8, 0.99)] and without.get_mom() is None
    with_betas.step()
    without.step()
    assert with_betas.get_mom() == [adam.param_groups[0]["betas"]] == [(pytest.approx(0.9 - 0.1 / 3), 0.99)]
    assert sgd.param_groups[0]["momentum"] == 0.5 and sgd.param_groups[0]["lr"] == pytest.approx(0.004)


def test_a_schedule_that_goes_on_leaves_the_first_update_to_the_optimizers_rate():
    """The values are DeepSpeed 0.19.8's."""
    optimizer = torch.optim.AdamW(parameters(), lr=3e-3)
    schedule = schedules.WarmupLR(optimizer, warmup_num_steps=9, last_batch_iteration=2)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(3):
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.003, 0.001892789260714372, 0.0021974602810768905, 0.002446394630357186])


@pytest.mark.parametrize("kind", schedules.VALID_LR_SCHEDULES)
def test_schedules_work_on_any_torch_optimizer_and_resume(kind):
    more = {"WarmupDecayLR": {"total_num_steps": 9}, "WarmupCosineLR": {"total_num_steps": 9},
            "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3}}.get(kind, {})
    make = getattr(schedules, kind)

    def build():
        return torch.optim.SGD(parameters(), lr=0.1, momentum=0.9)
    first = make(build(), **more)
    rates = []
    for _ in range(8):
        first.step()
        rates.append(first.get_last_lr())
    resumed = make(build(), **more)
    resumed.load_state_dict({"last_batch_iteration": 3})
    assert resumed.get_last_lr() == rates[3] == resumed.get_lr()
    for expected in rates[4:]:
        resumed.step()
        assert resumed.get_last_lr() == expected
    assert first.optimizer.param_groups[0]["lr"] == rates[-1][0] and len(set(map(tuple, rates))) > 1 or kind == "LRRangeTest"


class DenseLamb:
    """LAMB's formula on whole parameters, in double."""

    def __init__(self, params, lr, weight_decay):
        self.params, self.lr, self.decay, self.steps = list(params), lr, weight_decay, 0
        self.moments = [(torch.zeros(p.shape, dtype=torch.float64), torch.zeros(p.shape, dtype=torch.float64)) for p in self.params]

    @torch.no_grad()
    def step(self):
        self.steps += 1
        size = self.lr * (1 - 0.999**self.steps)**0.5 / (1 - 0.9**self.steps)
        for p, (m, v) in zip(self.params, self.moments):
            g, w = p.grad.double(), p.double()
            m.mul_(0.9).add_(g, alpha=0.1)
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            u = m / (v.sqrt() + 1e-8) + self.decay * w
            ratio = (w.norm() / u.norm()).clamp(0.01, 10)
            p.copy_(w - size * ratio * u)


def lamb(rank, world, stage, by_name):
    from deepspeed.ops.lamb import FusedLamb
    model, twin = Net(), Net()
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    given = {"config": {**config, "optimizer": {"type": "Lamb", "params": {"lr": 0.02, "weight_decay": 0.1}}}} if by_name else {
        "config": config, "optimizer": FusedLamb(model.parameters(), lr=0.02, weight_decay=0.1)}
    engine, *_ = unshard.initialize(model=model, **given)
    reference = DenseLamb(twin.parameters(), 0.02, 0.1)
    for step in range(5):
        engine.backward(loss_of(engine, rank, step))
        engine.step()
        dense.accumulate_mean_gradient(twin, [lambda m, r=r: loss_of(m, r, step) for r in range(world)])
        reference.step()
    dense.close(dense.weights(engine, model).values(), twin.parameters(), 1e-5)
    engine.destroy()


@pytest.mark.parametrize("world, stage, by_name", [(1, 0, True), (2, 0, False), (2, 1, True), (2, 2, False), (3, 3, True), (4, 3, False)])
def test_lamb_on_pieces_equals_its_formula_on_whole_parameters(world, stage, by_name):
    run_ranks(world, lamb, stage, by_name)


def test_lamb_alone_on_plain_tensors_and_continued_from_its_state():
    a, b, c = parameters(), parameters(), None
    mine, reference = optim.Lamb(a, lr=0.05, weight_decay=0.1), DenseLamb(b, 0.05, 0.1)
    for step in range(6):
        if step == 3:
            c = [nn.Parameter(p.detach().clone()) for p in a]
            again = optim.Lamb(c, lr=0.05, weight_decay=0.1)
            again.load_state_dict(mine.state_dict())
        give_gradients(a, step), give_gradients(b, step)
        mine.step(), reference.step()
        if c:
            give_gradients(c, step)
            again.step()
    dense.close(a, b, 1e-6)
    assert all(torch.equal(x, y) for x, y in zip(a, c))
    with pytest.raises(ValueError, match="min_coeff=2 and max_coeff=1"):
        optim.Lamb(a, min_coeff=2, max_coeff=1)
