"""What the ranks do in test_across_hosts.py."""
import time

import dense
import torch
import torch.distributed as dist
import torch.nn as nn

VOCABULARY, WIDTH = 19, 15


class Small(nn.Module):
    """Odd sizes, so that shards need padding; a tied head; a layer used twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        h = self.embed(ids)
        for layer in self.layers:
            h = h + torch.tanh(self.mixed(layer(self.norm(h))))
        return nn.functional.cross_entropy(self.head(h)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def ids(rank, micro):
    return torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(100 * micro + rank))


def settings(stage, dtype, gas):
    adam = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}}
    return dense.config(stage, gradient_accumulation_steps=gas, optimizer=adam, gradient_clipping=1.0, bf16={"enabled": dtype == "bf16"},
                        fp16={"enabled": dtype == "fp16", "initial_scale_power": 8}, unshard={"timeout_s": 30, "collective_check_s": 20})


def train(rank, world, cases, steps):
    """For each (stage, dtype, accumulation): losses of this rank, exact bits of the weights, and the weights (rank 0)."""
    import unshard
    found = []
    for stage, dtype, gas in cases:
        model, losses = Small(), []
        engine, *_ = unshard.initialize(model=model, model_parameters=list(model.parameters()), config=settings(stage, dtype, gas))
        for micro in range(steps * gas):
            loss = engine(ids(rank, micro))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        weights = list(dense.weights(engine, model).values())
        found.append({"losses": losses, "bits": dense.hex_of(weights),
                      "weights": torch.cat([w.flatten() for w in weights]).tolist() if rank == 0 else None})
        engine.destroy()
    return found


# ---- bytes: an engine that stays from call to call, so that the caller can read the link's own counters in between ----------------
class Wide(nn.Sequential):
    """1.6 million parameters in matrices; biases would only blur the count."""

    def __init__(self, layers=6, width=512):
        torch.manual_seed(0)
        super().__init__(*[nn.Linear(width, width, bias=False) for _ in range(layers)])


_kept = {}


def begin(rank, world, stage, dtype, zero):
    """Starts an engine and takes steps until every plan is made. Number of parameters."""
    import unshard
    model = Wide()
    engine, *_ = unshard.initialize(model=model, model_parameters=list(model.parameters()),
                                    config=dense.config(stage, zero=zero, bf16={"enabled": dtype == "bf16"}))
    _kept.update(engine=engine, model=model)
    more(rank, world, 4)
    return sum(p.numel() for p in model.parameters())


def more(rank, world, steps, pause=0.0):
    """More steps; in each, the last rank pauses before the third layer."""
    engine, model = _kept["engine"], _kept["model"]
    x = torch.ones(2, model[0].in_features, dtype=model[0].weight.dtype)
    late = model[2].register_forward_pre_hook(lambda *_: time.sleep(pause if rank == world - 1 else 0))
    dist.barrier()
    for _ in range(steps):
        engine.backward(engine(x).float().square().mean())
        engine.step()
    late.remove()


def forget(rank, world):
    """Counting starts anew."""
    import unshard
    unshard.reset_comm_counts(_kept["engine"])
    _kept["engine"]._store.reset_peak()
    _kept["before"] = unshard.residency_stats(_kept["engine"])


def counted(rank, world):
    """What the engine counted since forget()."""
    import unshard
    residency = unshard.residency_stats(_kept["engine"])
    since = {key: residency[key] - _kept["before"][key] for key in ("link_bytes", "let_go_early")}
    return {"counts": unshard.comm_counts(_kept["engine"]), "fetched": since["link_bytes"], "early": since["let_go_early"],
            "residency": residency}


def finish(rank, world):
    dist.barrier()
    _kept.pop("engine").destroy()
    _kept.clear()


# ---- training, evaluation and generation take turns ---------------------------------------------------------------------------------
def modes(rank, world, zero):
    """Touches outside the plan once every mode has had its turn, and in a forward that no plan foresees."""
    import unshard
    model = Small()
    engine, *_ = unshard.initialize(model=model, model_parameters=list(model.parameters()), config=dense.config(3, zero=zero))

    def outside_plan():
        return unshard.residency_stats(engine)["outside_plan"]

    def turn(n):
        for micro in range(2):
            engine.backward(engine(ids(rank, n + micro)))
            engine.step()
        engine.eval()
        with torch.no_grad():
            for micro in range(1 + (rank + n) % 2):
                engine(ids(rank, micro))
        with torch.inference_mode():
            for token in range(2 + rank):
                model(ids(rank, token))
        engine.train()
    turn(0), turn(2)
    before = outside_plan()
    turn(4), turn(6)
    between = outside_plan()
    with torch.no_grad():
        model.layers[2](torch.zeros(1, WIDTH))
        model.layers[0](torch.zeros(1, WIDTH))
    after = outside_plan()
    engine.destroy()
    return between - before, after - between


# ---- many small layers -------------------------------------------------------------------------------------------------------------
def tiny_layers(rank, world, layers):
    """Seconds of one step once the plan is made."""
    import unshard
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
    engine, *_ = unshard.initialize(model=model, model_parameters=list(model.parameters()), config=dense.config(3))
    seconds = []
    for _ in range(8):
        dist.barrier()
        begin = time.perf_counter()
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        seconds.append(time.perf_counter() - begin)
    engine.destroy()
    return min(seconds[3:])


# ---- "auto" --------------------------------------------------------------------------------------------------------------------------
def chosen_sizes(rank, world):
    """What "auto" became, and the loss of a step with it."""
    import unshard
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64))
    auto = {"stage3_param_persistence_threshold": "auto", "stage3_prefetch_bucket_size": "auto",
            "reduce_bucket_size": "auto"}
    engine, *_ = unshard.initialize(model=model, model_parameters=list(model.parameters()), config=dense.config(3, zero=auto))
    chosen = engine.zero_param_persistence_threshold(), engine.zero_prefetch_bucket_size(), engine.zero_reduce_bucket_size()
    loss = engine(torch.ones(1, 64)).sum()
    engine.backward(loss)
    engine.step()
    engine.destroy()
    return *chosen, float(loss)
