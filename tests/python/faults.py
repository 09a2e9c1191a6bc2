"""A short training in which one rank is killed, stopped or delayed at a place that a seed chooses; the part that runs on the ranks."""
import datetime
import functools
import os
import random
import signal
import threading
import time

import dense
import torch
import torch.nn as nn

PHASES = ["meet", "start", "forward", "backward", "step", "save"]
KINDS = ["kill", "stop", "pause", "delay"]          # pause: stopped, and continued in time
STEPS, LAYERS, WIDTH = 5, 4, 24
TIMEOUT_S, PAUSE_S, DELAY_S = 5, 1.0, 0.4


def scenario(seed, placements):
    """What happens to which rank, where; plain data. `placements`: {name: (hosts, environment)}."""
    rng = random.Random(seed)
    placement = rng.choice(sorted(placements))
    kind = rng.choices(KINDS, [4, 2, 2, 1])[0]
    phase = rng.choice(PHASES)
    return {"seed": seed, "placement": placement, "kind": kind, "phase": phase, "victim": rng.randrange(len(placements[placement][0])),
            "stage": rng.choice([0, 1, 2, 3, 3, 3]), "step": rng.randrange(1, STEPS - 1), "layer": rng.randrange(LAYERS),
            "after_ms": rng.choice([0, rng.uniform(0, 3), rng.uniform(0, 30)])}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.before_layer = lambda i, x: None

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            self.before_layer(i, x)
            x = torch.tanh(layer(x))
        return x


def loss_of(model, rank, step):
    x, y = dense.batch(rank, step, d=WIDTH)
    return (model(x) - y).square().mean()


_one_at_a_time = threading.Lock()       # the seed is the process's


@functools.cache
def expected(world):
    """Weights after the training, from one dense process."""
    with _one_at_a_time:
        return _train_alone(world)


def _train_alone(world):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        dense.accumulate_mean_gradient(model, [lambda m, r=r, step=step: loss_of(m, r, step) for r in range(world)])
        optimizer.step()
    return list(model.parameters())


class Fault:
    """What one rank suffers. `at` strikes there and then, `within` in the middle of what the caller does next."""

    def __init__(self, scenario, rank):
        self.scenario, self.mine = scenario, rank == scenario["victim"]

    def here(self, phase, step=None):
        return self.mine and self.scenario["phase"] == phase and step in (None, self.scenario["step"])

    def at(self, phase, step=None):
        if self.here(phase, step):
            self._strike()

    def within(self, phase, step=None):
        if not self.here(phase, step):
            return
        if self.scenario["kind"] == "delay":
            self._strike()
        else:
            threading.Thread(target=lambda: (time.sleep(self.scenario["after_ms"] / 1000), self._strike()), daemon=True).start()

    def _strike(self):
        kind = self.scenario["kind"]
        if kind == "delay":
            time.sleep(DELAY_S)
        else:
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


def run(rank, world, scenario, folder):
    """On every rank; the weights at the end."""
    import unshard
    fault, model = Fault(scenario, rank), Model()
    fault.within("meet")
    unshard.init_distributed(timeout=datetime.timedelta(seconds=TIMEOUT_S))
    fault.within("start")
    engine, *_ = unshard.initialize(model=model, model_parameters=list(model.parameters()), config=dense.config(
        scenario["stage"], unshard={"timeout_s": TIMEOUT_S, "collective_check_s": TIMEOUT_S}))
    for step in range(STEPS):
        model.before_layer = lambda i, x, step=step: _in_layer(fault, i, x, step)
        loss = loss_of(engine, rank, step)
        engine.backward(loss)
        fault.within("step", step)
        engine.step()
        if step == scenario["step"]:
            fault.within("save", step)
            engine.save_checkpoint(folder, tag="now")
    weights = [value.tolist() for value in dense.weights(engine, model).values()]
    engine.destroy()
    return weights


def _in_layer(fault, i, x, step):
    if i == fault.scenario["layer"]:
        fault.at("forward", step)
        if fault.here("backward", step) and x.requires_grad:
            x.register_hook(lambda g: fault.at("backward"))
        elif fault.here("backward", step):                       # the first layer's input has no gradient
            fault.within("backward", step)
