"""Random programs in which every rank goes its own way, what they should compute, and smaller programs that fail in the same way.

A program is plain data (JSON). All ranks take part in its updates; between them each rank has a list of operations of its own: forwards
along its own path through the model, some trained and some not, weights printed, forwards that raise, waits, nothing at all. `run` executes
it on the ranks, `expected` computes the same with one dense model in one process, `differences` compares.
"""
import copy
import random
import time

import dense
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
WAYS = ["engine", "loss", "scaled", "twice", "sum_of_two", "checkpoint", "reentrant", "plain_call"]
READS = ["sum", "item", "norm", "copy", "row"]


class Model(nn.Module):
    """Layers of equal width, any of which a path may visit any number of times, in any order."""

    def __init__(self, spec):
        super().__init__()
        g = torch.Generator().manual_seed(spec["seed"])
        width = spec["width"]
        self.layers = nn.ModuleList()
        for kind in spec["layers"]:
            layer = {"linear": lambda: nn.Linear(width, width), "norm": lambda: nn.LayerNorm(width),
                     "two": lambda: nn.Sequential(nn.Linear(width, width + 3), nn.GELU(), nn.Linear(width + 3, width, bias=False)),
                     "tied": lambda: nn.Linear(width, width)}[kind]()
            with torch.no_grad():
                for p in layer.parameters():
                    p.copy_(torch.randn(p.shape, generator=g) * width**-0.5)
            if kind == "tied":
                layer.weight = self.layers[0].weight
            self.layers.append(layer)
        for i in spec["frozen"]:
            self.layers[i].requires_grad_(False)

    def forward(self, x, path, way="engine", raises_at=-1):
        for at, i in enumerate(path):
            if at == raises_at:
                raise LookupError("as the program wants it")
            layer = self.layers[i]
            if way == "checkpoint":
                x = x + torch.tanh(checkpoint(layer, x, use_reentrant=False))
            elif way == "reentrant":
                x = x + torch.tanh(checkpoint(layer, x.requires_grad_() if x.is_leaf else x, use_reentrant=True))
            else:
                x = x + torch.tanh(layer(x))
        return x


# ---- making one --------------------------------------------------------------------------------------------------------------------
def generate(seed, hosts):
    """A program for len(hosts) ranks."""
    rng = random.Random(seed)
    kinds = ["linear"] + rng.choices(["linear", "norm", "two", "tied"], k=rng.randint(1, 4))
    model = {"seed": rng.randrange(10**6), "width": rng.choice([5, 8, 13]), "layers": kinds,
             "frozen": [i for i in range(1, len(kinds)) if kinds[i] != "tied" and rng.random() < 0.1]}
    gas = rng.choice([1, 1, 2, 3])
    ends = [rng.randint(1, 12) if rng.random() < 0.2 else 99 for _ in hosts]          # micro-batches after which a rank's data end
    alike = rng.random() < 0.15                                                       # a program without divergence, now and then
    steps = []
    for step in range(rng.randint(1, 4)):
        micros = [[[] if step * gas + micro >= end else _operations(rng, kinds) for end in ends] for micro in range(gas)]
        if alike:
            micros = [[copy.deepcopy(micro[0]) for _ in hosts] for micro in micros]
        steps.append({"micros": micros, "read_gradients": rng.random() < 0.3})
    zero = {"stage": rng.choice([0, 1, 2, 3, 3, 3, 3, 3]), "stage3_max_live_parameters": rng.choice([0, 100, 10**9]),
            "stage3_prefetch_bucket_size": rng.choice([0, 60, 10**7]), "stage3_param_persistence_threshold": rng.choice([0, 0, 20]),
            "reduce_bucket_size": rng.choice([30, 1000, 10**8]), "overlap_comm": rng.random() < 0.5,
            "stage3_max_reuse_distance": rng.choice([0, 10**9])}
    return {"seed": seed, "hosts": list(hosts), "gas": gas, "zero": zero, "optimizer": rng.choice(["SGD", "momentum", "AdamW"]),
            "clip": rng.choice([0.0, 0.0, 0.5]), "model": model, "steps": steps}


def _operations(rng, kinds):
    operations = []
    for _ in range(rng.choice([0, 1, 1, 1, 2, 2, 3])):
        path = [rng.randrange(len(kinds)) for _ in range(rng.randint(1, 5))]
        do = rng.choices(["train", "evaluate", "read", "raise", "drop", "wait"], [10, 3, 3, 2, 1, 1])[0]
        one = {"do": do, "path": path, "input": rng.randrange(10**6)}
        if do == "train":
            one["way"] = rng.choice(WAYS)
        elif do == "evaluate":
            one["times"] = rng.randint(1, 4)
        elif do == "read":
            one.update(layer=rng.randrange(len(kinds)), how=rng.choice(READS))
        elif do == "raise":
            one["at"] = rng.randrange(len(path))
        elif do == "wait":
            one["ms"] = rng.choice([1, 5, 20])
        operations.append(one)
    return operations


# ---- running it --------------------------------------------------------------------------------------------------------------------
class Sharded:
    """How operations are done on a rank."""

    def __init__(self, engine, model):
        self.engine, self.model = engine, model

    def forward(self, *args):
        return self.engine(*args)

    def wait(self, ms):
        time.sleep(ms / 1000)

    def train(self, loss, way):
        if way in ("loss", "plain_call"):
            loss.backward()
        elif way == "scaled":
            self.engine.scale(loss).backward()
        else:
            self.engine.backward(loss, retain_graph=way == "twice")


class Dense:
    """How they are done in the reference, `share` being what the mean takes of one rank's loss."""

    def __init__(self, model, share):
        self.model, self.share = model, share

    def forward(self, *args):
        return self.model(*args)

    def wait(self, ms):
        pass

    def train(self, loss, way):
        (loss * self.share).backward(retain_graph=way == "twice")


def operate(face, one, width):
    """Returns what the rank sees: a number, or None."""
    g = torch.Generator().manual_seed(one["input"])
    x, y = torch.randn(3, width, generator=g), torch.randn(3, width, generator=g)
    do, path = one["do"], one["path"]
    if do == "wait":
        face.wait(one["ms"])
    elif do == "read":
        return _read(face.model.layers[one["layer"]], one["how"])
    elif do == "raise":
        try:
            face.forward(x, path, "engine", one["at"])
        except LookupError:
            return 1.0
    elif do == "drop":
        return face.forward(x, path).square().mean().item()
    elif do == "evaluate":
        with torch.no_grad():
            return sum((face.forward(x + i, path) - y).square().mean().item() for i in range(one["times"]))
    elif do == "train":
        return _train(face, one["way"], path, x, y)
    return None


def _train(face, way, path, x, y):
    out = face.model(x, path) if way == "plain_call" else face.forward(x, path, way)
    loss = (out - y).square().mean()
    if way == "sum_of_two":
        loss = loss + face.forward(x * 2, path[::-1]).abs().mean()
    if loss.requires_grad:                                       # not where the path has frozen layers only
        face.train(loss, way)
        if way == "twice":
            face.train(loss, "engine")
    return loss.item()


def _read(layer, how):
    weight = next(layer.parameters())
    with torch.no_grad():
        return {"sum": lambda: weight.sum().item(), "item": lambda: weight.flatten()[1].item(), "norm": lambda: weight.norm().item(),
                "copy": lambda: weight.clone().abs().max().item(), "row": lambda: weight.detach()[0].mean().item()}[how]()


def config_of(program):
    kind = {"SGD": ("SGD", {"lr": 0.05}), "momentum": ("SGD", {"lr": 0.05, "momentum": 0.9}),
            "AdamW": ("AdamW", {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.1})}[program["optimizer"]]
    return dense.config(program["zero"]["stage"], zero=program["zero"], gradient_accumulation_steps=program["gas"],
                        gradient_clipping=program["clip"], optimizer={"type": kind[0], "params": kind[1]},
                        unshard={"timeout_s": 12, "collective_check_s": 8})


def run(rank, world, program):
    """On every rank. What this rank saw, in order, the gradients it read, and the weights at the end."""
    import unshard
    model = Model(program["model"])
    engine, *_ = unshard.initialize(model=model, model_parameters=list(model.parameters()), config=config_of(program))
    face, seen, gradients = Sharded(engine, model), [], []
    for step in program["steps"]:
        for i, micro in enumerate(step["micros"]):
            seen += [operate(face, one, program["model"]["width"]) for one in micro[rank]]
            if step["read_gradients"] and i == program["gas"] - 1:
                gradients.append([_plain(unshard.safe_get_full_grad(p)) for p in model.parameters() if p.requires_grad])
            engine.step()
    weights = [value.tolist() for value in dense.weights(engine, model).values()]
    engine.destroy()
    return {"seen": seen, "gradients": gradients, "weights": weights}


def _plain(tensor):
    return None if tensor is None else tensor.flatten().tolist()


def expected(program):
    """What each rank should return."""
    world, model = len(program["hosts"]), Model(program["model"])
    trained = [p for p in model.parameters() if p.requires_grad]
    config = config_of(program)["optimizer"]
    optimizer = getattr(torch.optim, config["type"])(trained, **config["params"])
    face, seen, gradients = Dense(model, 1 / (world * program["gas"])), [[] for _ in range(world)], []
    for step in program["steps"]:
        optimizer.zero_grad(set_to_none=True)
        for micro in step["micros"]:
            for rank in range(world):
                seen[rank] += [operate(face, one, program["model"]["width"]) for one in micro[rank]]
        if step["read_gradients"]:
            gradients.append([_plain(p.grad) for p in trained])
        if program["clip"]:
            nn.utils.clip_grad_norm_([p for p in trained if p.grad is not None], program["clip"])
        optimizer.step()
    weights = [p.detach().tolist() for p in model.parameters()]
    return [{"seen": seen[rank], "gradients": gradients, "weights": weights} for rank in range(world)]


def differences(program, values):
    """What of the ranks' values isn't as expected, in words."""
    found = []
    for rank, (got, want) in enumerate(zip(values, expected(copy.deepcopy(program)))):
        if len(got["seen"]) != len(want["seen"]):
            found.append(f"rank {rank} saw {len(got['seen'])} values, not {len(want['seen'])}")
        for i, (a, b) in enumerate(zip(got["seen"], want["seen"])):
            if not _close(a, b):
                found.append(f"rank {rank}, its operation {i}: {a}, not {b}")
        for i, (a, b) in enumerate(zip(got["gradients"], want["gradients"])):
            found += [f"rank {rank}, gradients read the {i + 1}. time, trained parameter {k}: {one}, not {two}"
                      for k, (one, two) in enumerate(zip(a, b)) if not _close(one, two)]
        found += [f"rank {rank}, weight {k}: off by {(torch.tensor(a) - torch.tensor(b)).abs().max().item():.3g}"
                  for k, (a, b) in enumerate(zip(got["weights"], want["weights"])) if not _close(a, b)]
    return found


def _close(a, b):
    """A gradient that no rank had is None on one side, zeros on neither."""
    if a is None or b is None:
        return a is b
    return torch.allclose(torch.tensor(a), torch.tensor(b), **TOLERANCE)


# ---- making it smaller ---------------------------------------------------------------------------------------------------------------
def shrink(program, fails, budget_s=90):
    """The smallest program found for which `fails(program)` holds still, by leaving out steps, ranks, operations and parts of paths."""
    end, improved = time.monotonic() + budget_s, True
    while improved and time.monotonic() < end:
        improved = False
        for smaller in _smaller(program):
            if time.monotonic() > end:
                break
            if fails(copy.deepcopy(smaller)):
                program, improved = smaller, True
                break
    return program


def _smaller(program):
    """Programs with one thing less, the largest things first."""
    def changed(change):
        other = copy.deepcopy(program)
        change(other)
        return other

    yield from (changed(lambda o, i=i: o["steps"].pop(i)) for i in range(len(program["steps"]) - 1, -1, -1))
    for rank in range(len(program["hosts"])):
        if len(program["hosts"]) > 2:
            yield changed(lambda o, rank=rank: [o["hosts"].pop(rank), [micro.pop(rank) for step in o["steps"] for micro in step["micros"]]])
    places = [(i, j, rank) for i, step in enumerate(program["steps"]) for j, micro in enumerate(step["micros"])
              for rank, operations in enumerate(micro) if operations]
    for i, j, rank in places:
        yield changed(lambda o, i=i, j=j, rank=rank: o["steps"][i]["micros"][j][rank].clear())
    if program["gas"] > 1:
        yield changed(lambda o: [o.update(gas=1), [step.update(micros=[_joined(step["micros"])]) for step in o["steps"]]])
        for j in range(program["gas"]):
            yield changed(lambda o, j=j: [o.update(gas=o["gas"] - 1), [step["micros"].pop(j) for step in o["steps"]]])
    for i, j, rank in places:
        for k, one in enumerate(program["steps"][i]["micros"][j][rank]):
            yield changed(lambda o, i=i, j=j, rank=rank, k=k: o["steps"][i]["micros"][j][rank].pop(k))
            if len(one["path"]) > 1 and one["do"] not in ("read", "wait"):
                yield changed(lambda o, i=i, j=j, rank=rank, k=k: _shorten(o["steps"][i]["micros"][j][rank][k]))
            if one.get("way", "engine") != "engine":
                yield changed(lambda o, i=i, j=j, rank=rank, k=k: o["steps"][i]["micros"][j][rank][k].update(way="engine"))
    for i, step in enumerate(program["steps"]):
        if step["read_gradients"]:
            yield changed(lambda o, i=i: o["steps"][i].update(read_gradients=False))
    if program["clip"]:
        yield changed(lambda o: o.update(clip=0.0))
    if program["optimizer"] != "SGD":
        yield changed(lambda o: o.update(optimizer="SGD"))
    if program["model"]["frozen"]:
        yield changed(lambda o: o["model"]["frozen"].pop())


def _joined(micros):
    """One micro-batch with the operations of several."""
    return [sum(of_rank, []) for of_rank in zip(*micros)]


def _shorten(one):
    one["path"].pop()
    if "at" in one:
        one["at"] = min(one["at"], len(one["path"]) - 1)


def text(program):
    """For people: what each rank does, and the rest of the program."""
    rest = {key: value for key, value in program.items() if key != "steps"}
    lines = [f"{rest}"]
    for i, step in enumerate(program["steps"]):
        for j, micro in enumerate(step["micros"]):
            lines += [f"  step {i} micro-batch {j} rank {rank}: {operations}" for rank, operations in enumerate(micro)]
        lines.append(f"  step {i}: {'gradients read, ' if step['read_gradients'] else ''}update")
    return "\n".join(lines)
