"""Building partitioned models, whole values, and the attributes of partitioned parameters, as Python users meet them."""
import json
import os

import dense
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from ranks import run_ranks

import unshard

CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
          "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 4}}
MEMORY = [{}, {"UNSHARD_SHARE_MEMORY": "off"}]


def same_everywhere(tensor):
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, tensor.detach().clone().tolist())
    return all(v == out[0] for v in out)


def partitioned(parameter):
    return "DeferredInit" in str(torch._C._dispatch_keys(parameter))


class Model(nn.Module):
    """Tied weights, a raw parameter at the root, a small one, nested containers, an initialisation of its own."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(3))
        self.root = nn.Parameter(torch.randn(9, 3))
        self.apply(self.start)

    def start(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.1)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) * self.scale.sum() + self.root.sum()


def built(rank, world, dtype):
    torch.manual_seed(17)                          # the same draws on every rank, so that a dense twin can be made
    twin = Model()
    torch.manual_seed(17)
    with unshard.zero.Init(config_dict_or_path=CONFIG, dtype=getattr(torch, dtype)):
        model = Model()
    assert dist.is_initialized()
    assert {n for n, p in model.named_parameters() if not partitioned(p)} == {"scale"}
    assert model.head.weight is model.embed.weight and {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
    for (name, p), q in zip(model.named_parameters(), twin.parameters()):
        if dtype != "float32" and p.dim() == 2 and name != "root":
            continue                               # drawn again by start(), in the dtype it then has
        assert p.shape == q.shape and torch.equal(p.detach().clone(), q.detach().to(p.dtype)), name
    if dtype == "float32":
        engine, *_ = unshard.initialize(model=model, config=CONFIG)
        ids = torch.arange(6).view(2, 3)
        engine.backward(engine(ids).square().mean())
        engine.step()
        twin(ids).square().mean().backward()
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
        dense.close(dense.weights(engine, model).values(), twin.parameters(), 1e-5)
        engine.destroy()


@pytest.mark.parametrize("env", MEMORY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_built_partitioned_equals_one_built_whole(dtype, env):
    run_ranks(2, built, dtype, env=env)


def different_seeds(rank, world):
    torch.manual_seed(rank)
    with unshard.zero.Init(config_dict_or_path=CONFIG):
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3))
    assert all(same_everywhere(p) for p in model.parameters())
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3))
    assert torch.equal(model[0].weight.detach().clone(), twin[0].weight)        # rank 0's draws


@pytest.mark.parametrize("env", MEMORY)
def test_values_are_those_of_rank_0_whatever_the_seeds(env):
    run_ranks(2, different_seeds, env=env)


def forms(rank, world):
    with unshard.zero.Init(enabled=False):
        plain = nn.Linear(8, 8)
    with unshard.zero.Init(config_dict_or_path={"zero_optimization": {"stage": 2}}):
        whole = nn.Linear(8, 8)
    assert not partitioned(plain.weight) and not partitioned(whole.weight)
    half_resolved = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": 0},
                     "bf16": {"enabled": "auto"}, "train_batch_size": 7, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    with unshard.zero.Init(config_dict_or_path=half_resolved):
        outer = nn.Linear(8, 8)
        with unshard.zero.Init(config_dict_or_path=half_resolved, dtype=torch.bfloat16):
            inner = nn.Linear(8, 8)
        again = nn.Linear(8, 8)
        engine, *_ = unshard.initialize(model=nn.Linear(4, 4), config={**CONFIG, "zero_optimization": {"stage": 0}})
    assert [p.dtype for p in (outer.weight, inner.weight, again.weight)] == [torch.float32, torch.bfloat16, torch.float32]
    assert all(partitioned(p) for p in (outer.weight, inner.weight, again.weight)) and not partitioned(engine.module.weight)
    later = nn.Linear(8, 8)
    assert not partitioned(later.weight)
    want = later.weight.detach().clone()
    with open(f"c{rank}.json", "w") as file:
        json.dump(half_resolved, file)
    unshard.zero.Init(module=later, config_dict_or_path=f"c{rank}.json")
    assert partitioned(later.weight) and (rank or torch.equal(later.weight.detach().clone(), want))
    try:
        with unshard.zero.Init(config_dict_or_path=half_resolved):
            nn.Linear(8, 8)
            raise KeyError("the user's")
    except KeyError:
        pass
    assert not partitioned(nn.Linear(8, 8).weight)


def test_forms_of_init():
    run_ranks(2, forms)


class Positions(nn.Module):
    """A table of positions as PyTorch's tutorial makes it: by torch.zeros, for activations of whatever dtype."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        table = torch.zeros(5, 8)
        table[:, 0::2] = torch.sin(torch.arange(5).float()[:, None] / 3)
        self.register_buffer("table", table)

    def forward(self, x):
        return self.linear(x + self.table)


def constructors(rank, world):
    """As recorded from 0.19.8: floats of torch's constructors are of the dtype of the parameters; what isn't made by them keeps its own."""
    import deepspeed
    config, override = {**CONFIG, "bf16": {"enabled": True}}, deepspeed.zero.DeepSpeedTensorOverride

    def made():
        return [t.dtype for t in (torch.zeros(2), torch.tensor(0.5), torch.full((2,), 1.0), torch.randn(1), torch.arange(2),
                                  torch.ones(2).float(), torch.arange(3) / 7, torch.zeros(1, dtype=torch.float32))]
    bf16, fp32, whole = torch.bfloat16, torch.float32, torch.int64
    plain = [fp32] * 4 + [whole] + [fp32] * 3
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Positions()
        assert made() == [bf16] * 4 + [whole] + [fp32] * 3
        with deepspeed.zero.Init(config_dict_or_path=config, tensor_overrides=[override.device]):
            assert made() == plain
        with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.float16):
            assert made()[0] == torch.float16
        with deepspeed.zero.Init(enabled=False):
            assert made()[0] == bf16
        deepspeed.initialize(model=nn.Linear(4, 4), config={**CONFIG, "zero_optimization": {"stage": 0}})[0].destroy()
    assert made() == plain
    with unshard.zero.Init(config_dict_or_path=config):
        assert made() == plain
    torch.manual_seed(0)
    assert torch.equal(model.linear.weight.detach().clone(), nn.Linear(8, 8, dtype=bf16).weight)        # drawn in bf16, as there
    engine = deepspeed.initialize(model=model, config=config)[0]
    engine.backward(engine(torch.ones(2, 5, 8, dtype=bf16)).float().mean())
    engine.step()


def test_what_torchs_constructors_make_inside_init():
    run_ranks(1, constructors)


def gathered(rank, world, stage):
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3))
    engine, *_ = unshard.initialize(model=model, config={**CONFIG, "zero_optimization": {**CONFIG["zero_optimization"], "stage": stage}})
    first, params = model[0].weight, list(model.parameters())
    with unshard.zero.GatheredParameters(params):
        for p in params:
            assert p.detach().numpy().size == p.numel()
    with unshard.zero.GatheredParameters(params, modifier_rank=1):
        for p in params:
            p.data.fill_(float(rank + 5))
    assert all((p.detach().clone() == 6).all() for p in params) and all(same_everywhere(p) for p in params)
    with unshard.zero.GatheredParameters(first, modifier_rank=0):
        if rank == 0:
            first.detach().numpy()[:] = 2                      # below the operators
    assert (first.detach().clone() == 2).all()
    stranger = nn.Parameter(torch.ones(3))
    with unshard.zero.GatheredParameters([stranger, torch.ones(2), *model.buffers()], modifier_rank=0):
        stranger.data.fill_(rank)
    assert (stranger == rank).all()                            # nobody's: left alone
    for wrong, error in ((world, ValueError), (-1, ValueError), (1.5, TypeError)):
        with pytest.raises(error):
            unshard.zero.GatheredParameters(first, modifier_rank=wrong)
    assert (unshard.safe_get_full_fp32_param(first.detach()) == 2).all()      # a new object over its storage
    with unshard.zero.GatheredParameters([], modifier_rank=0), unshard.zero.GatheredParameters(p for p in params):
        pass
    assert (unshard.safe_get_full_fp32_param(first) == 2).all()
    engine.backward(engine(torch.ones(2, 8)).sum())
    engine.step()
    assert same_everywhere(first) and not (first.detach().clone() == 2).all()
    engine.destroy()


@pytest.mark.parametrize("env", MEMORY)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gathered_parameters(stage, env):
    run_ranks(2, gathered, stage, env=env)


def attributes(rank, world):
    import deepspeed
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = Model()
    p, small = model.embed.weight, model.scale
    assert p.ds_shape == torch.Size([11, 8]) and p.ds_numel == 88 and not p.ds_persist and small.ds_persist
    assert small.ds_shape == torch.Size([3]) and p.ds_status == deepspeed.zero.ZeroParamStatus.NOT_AVAILABLE
    for modifier in (None, 0):
        with deepspeed.zero.GatheredParameters([p, small], modifier_rank=modifier):
            assert p.ds_status == small.ds_status == deepspeed.zero.ZeroParamStatus.AVAILABLE
            with deepspeed.zero.GatheredParameters(p):
                pass
            assert p.ds_status == deepspeed.zero.ZeroParamStatus.AVAILABLE
        assert p.ds_status == deepspeed.zero.ZeroParamStatus.NOT_AVAILABLE
    assert p.ds_tensor.numel() == 44 and isinstance(p.ds_id, int) and p.ds_id != small.ds_id
    stranger = nn.Parameter(torch.ones(2))
    assert not any(hasattr(stranger, a) for a in ("ds_id", "ds_shape", "ds_numel", "ds_status", "ds_tensor", "ds_persist"))
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
    assert engine.gradient_clipping() == 1.0 and p.ds_numel == 88
    engine.destroy()
    assert not hasattr(p, "ds_id") and not partitioned(p)


def test_ds_attributes_are_there_exactly_while_somebody_owns_the_parameter():
    run_ranks(2, attributes)


def access(rank, world, stage, dtype):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    half = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    engine, *_ = unshard.initialize(model=model, config=dense.config(stage, optimizer={"type": "AdamW", "params": {"lr": 0.01}}, **half))
    w = model[0].weight
    assert unshard.safe_get_full_grad(w) is None
    engine.backward(engine(torch.full((2, 5), 0.5 + rank, dtype=w.dtype)).float().mean())
    grad = unshard.safe_get_full_grad(w)
    unshard.safe_set_full_grad(w, grad * 2)
    assert torch.allclose(unshard.safe_get_full_grad(w), grad * 2)
    pieces = [None] * world
    dist.all_gather_object(pieces, unshard.safe_get_local_grad(w).tolist())
    assert torch.allclose(torch.tensor(sum(pieces, [])), 2 * grad.flatten())
    unshard.safe_update_full_grad_vectorized([w], lambda g, p: g / 2)
    assert torch.allclose(unshard.safe_get_full_grad(w), grad)
    engine.step()
    assert torch.allclose(unshard.safe_get_full_optimizer_state(w, "exp_avg"), 0.1 * grad, rtol=1e-4, atol=1e-8)
    assert unshard.safe_get_full_optimizer_state(w, "no_such_state") is None
    value = torch.arange(35.0).view(7, 5)
    unshard.safe_set_full_fp32_param(w, value)
    assert torch.equal(unshard.safe_get_full_fp32_param(w), value) and torch.equal(w.detach().clone(), value.to(w.dtype))
    unshard.safe_set_full_optimizer_state(w, value, "exp_avg")
    assert torch.equal(unshard.safe_get_full_optimizer_state(w, "exp_avg"), value)
    local = unshard.safe_get_local_fp32_param(w)
    unshard.safe_set_local_fp32_param(w, torch.full_like(local, rank + 1.0))
    unshard.safe_set_local_optimizer_state(w, torch.full_like(local, rank + 3.0), "exp_avg")
    cut = torch.cat([torch.full((18,), 1.0), torch.full((17,), 2.0)]).view(7, 5)
    assert torch.equal(unshard.safe_get_full_fp32_param(w), cut) and torch.equal(w.detach().clone(), cut.to(w.dtype))
    assert torch.equal(unshard.safe_get_full_optimizer_state(w, "exp_avg"), cut + 2)
    with pytest.raises(ValueError, match="belongs to no engine"):
        unshard.safe_get_full_fp32_param(nn.Parameter(torch.ones(2)))
    with pytest.raises(ValueError, match="shape"):
        unshard.safe_set_full_fp32_param(w, torch.ones(3))
    engine.destroy()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_access_to_masters_gradients_and_states(stage, dtype):
    run_ranks(2, access, stage, dtype)


def two_stores(rank, world):
    """A model of two parts, each built in a context of its own, and a third part built whole."""
    torch.manual_seed(5)
    with unshard.zero.Init(config_dict_or_path=CONFIG):
        a = nn.Linear(8, 16)
    with unshard.zero.Init(config_dict_or_path=CONFIG):
        b = nn.Linear(16, 16)
    c = nn.Linear(16, 3)
    model = nn.Sequential(a, b, c)
    torch.manual_seed(5)
    twin = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3))
    engine, *_ = unshard.initialize(model=model, config=CONFIG)
    x = torch.ones(2, 8)
    engine.backward(engine(x).square().mean())
    engine.step()
    twin(x).square().mean().backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    dense.close(dense.weights(engine, model).values(), twin.parameters(), 1e-6)
    engine.destroy()


def test_parts_built_in_several_contexts_make_one_engine():
    run_ranks(2, two_stores)


def never_the_whole(rank, world):
    """32 MiB a layer, 8 layers: a rank holds its half and one layer at a time."""
    import resource
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with unshard.zero.Init(config_dict_or_path=CONFIG):
        model = nn.Sequential(*[nn.Linear(2048, 4096, bias=False) for _ in range(8)])
    assert all(partitioned(p) for p in model.parameters())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux")
def test_no_rank_ever_holds_the_whole_model():
    for grown_kib in run_ranks(2, never_the_whole, env={"UNSHARD_SHARE_MEMORY": "off"}):
        assert grown_kib / 1024 < 128 + 3 * 32


# ---- models that come as they are -----------------------------------------------------------------------------------------------------
def sixteen_bit_already(rank, world, dtype, stage):
    """A model in 16 bits gives the weights that its twin in fp32 gives, whose values are the same."""
    found = []
    for convert in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)).to(getattr(torch, dtype))
        if convert:
            model = model.float()
        settings = {"bf16": {"enabled": True}} if dtype == "bfloat16" else {"fp16": {"enabled": True, "loss_scale": 8}}
        engine, *_ = unshard.initialize(model=model, model_parameters=list(model.parameters()), config=dense.config(stage, **settings))
        for step in range(3):
            x, y = dense.batch(rank, step)
            engine.backward((engine(x.to(getattr(torch, dtype))).float() - y).square().mean())
            engine.step()
        found.append(dense.hex_of(list(dense.weights(engine, model).values())))
        engine.destroy()
    return found


@pytest.mark.parametrize("memory", MEMORY, ids=["shared", "unshared"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_a_model_that_is_in_16_bits_already(world, stage, dtype, memory):
    first, *others = run_ranks(world, sixteen_bit_already, dtype, stage, env=memory)
    assert first[0] == first[1] and all(other == first for other in others)


def shown(rank, world):
    import copy
    torch.manual_seed(0)
    model = nn.Linear(400, 3)
    want = model.weight.detach().clone()
    engine, *_ = unshard.initialize(model=model, model_parameters=list(model.parameters()), config=CONFIG)
    weight = model.weight
    assert partitioned(weight)
    if rank == 0:                                                # on one rank only
        assert repr(weight) == repr(nn.Parameter(want)) and f"{weight.data}" == f"{want}"
        assert weight.tolist() == want.tolist() and weight[0, :3].tolist() == want[0, :3].tolist()
        best = copy.deepcopy(model.state_dict())
        assert torch.equal(best["weight"], want) and not partitioned(best["weight"])
    engine.backward(engine(torch.ones(2, 400)).sum())
    engine.step()
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    return True


@pytest.mark.parametrize("memory", MEMORY, ids=["shared", "unshared"])
def test_a_partitioned_weight_is_printed_and_copied_on_one_rank(memory):
    assert run_ranks(2, shown, env=memory) == [True, True]


def asked_below_the_operators(rank, world):
    """What torch's binding does itself: tensors made like a partitioned one, and whether it is in shared memory."""
    import deepspeed
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        layer = nn.Linear(8, 8, dtype=torch.float64)
        for weight in (layer.weight, nn.ModuleList([layer])[0].weight.data):
            torch.manual_seed(3)
            nn.init.trunc_normal_(weight, std=0.1)                    # by new_tensor
    torch.manual_seed(3)
    weight = layer.weight
    assert partitioned(weight)
    assert torch.equal(weight.detach().clone(), nn.init.trunc_normal_(torch.empty(8, 8, dtype=torch.float64), std=0.1))
    for like in (weight, weight.data):
        assert like.new_tensor([1, 2]).tolist() == [1.0, 2.0] and like.new_tensor(3).dtype == torch.float64
        assert like.new(2, 3).shape == (2, 3) and like.new([4.0]).tolist() == [4.0] and like.new().dtype == torch.float64
        assert torch.ones(1).new_tensor(like).shape == (8, 8) and not like.is_shared()
    with pytest.raises(RuntimeError, match="share a copy"):
        layer.share_memory()


def test_tensors_are_made_like_a_partitioned_one():
    run_ranks(1, asked_below_the_operators)


def unlike(rank, world, what):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    config = dense.config(3)
    if what == "requires_grad":
        model[0].weight.requires_grad_(rank == 0)
    elif what == "optimizer":
        config["optimizer"] = {"type": "SGD" if rank else "AdamW", "params": {"lr": 0.1}}
    elif what == "schedule":
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 2 + rank}}
    else:
        config["optimizer"]["params"]["lr"] = 0.1 * (rank + 1)
    unshard.initialize(model=model, model_parameters=list(model.parameters()), config=config)


@pytest.mark.parametrize("what", ["requires_grad", "lr", "optimizer", "schedule"])
def test_ranks_that_differ_are_named_at_the_start(what):
    for outcome in run_ranks(2, unlike, what, expect_failure=True, limit=40):
        assert outcome.code == 1 and "differ" in outcome.output, outcome.output[-1500:]
        assert {"requires_grad": "'0.weight'", "lr": "optimizer.params.lr = 0.1", "optimizer": "optimizer.type = AdamW",
                "schedule": "warmup_num_steps = 2"}[what] in outcome.output, outcome.output[-1500:]


def after_the_end(rank, world):
    model = nn.Linear(4, 4)
    engine, *_ = unshard.initialize(model=model, model_parameters=list(model.parameters()), config=dense.config(2))
    engine.destroy()
    for call in (lambda: engine.set_train_batch_size(8), lambda: engine.set_train_micro_batch_size(2), engine.reload_states,
                 lambda: engine.no_sync().__enter__()):
        with pytest.raises((ValueError, RuntimeError), match="destroyed"):
            call()
    return True


def test_calls_after_destroy_are_errors():
    assert run_ranks(1, after_the_end) == [True]


def local_masters(rank, world, stage):
    """Pieces that DeepSpeed's module sets are read back at once, and count in forward from the next update on, as recorded from 0.19.8."""
    import deepspeed
    from deepspeed import utils
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.zero_()
    engine = deepspeed.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, "optimizer": {"type": "SGD", "params": {"lr": 0.25}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}})[0]
    piece = utils.safe_get_local_fp32_param(model.weight)
    utils.safe_set_local_fp32_param(model.weight, torch.full_like(piece, 2.0))
    utils.safe_set_local_fp32_param(model.weight, torch.full_like(piece, rank + 1.0))
    assert (utils.safe_get_local_fp32_param(model.weight) == rank + 1).all()
    assert utils.safe_get_full_fp32_param(model.weight).tolist() == [[1.0] * 4, [2.0] * 4]
    seen = engine(torch.ones(1, 4))
    assert seen.tolist() == [[2.0, 2.0]]                      # the old weights
    engine.backward(seen.sum())
    engine.step()
    assert engine(torch.ones(1, 4)).tolist() == [[4 * 0.75 - 0.25, 4 * 1.75 - 0.25]]
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_local_masters_set_through_the_drop_in_count_from_the_next_update(stage):
    run_ranks(2, local_masters, stage)


def local_masters_in_another_order(rank, world, stage):
    """Of a parameter that lies transposed (or channels_last), pieces are cut in the order of its memory, of a value that waits too."""
    import deepspeed
    from deepspeed import utils

    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.arange(24.0).view(4, 6).t())

        def forward(self, x):
            return x @ self.weight

    engine = deepspeed.initialize(model=Transposed(), config={
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.25}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}})[0]
    weight = engine.module.weight
    piece = utils.safe_get_local_fp32_param(weight)
    assert piece.tolist() == [12.0 * rank + i for i in range(12)]
    utils.safe_set_local_fp32_param(weight, piece + 100)
    assert utils.safe_get_local_fp32_param(weight).tolist() == (piece + 100).tolist()
    utils.safe_set_full_fp32_param(weight, (torch.arange(24.0).view(4, 6).t() + 200).contiguous())
    assert utils.safe_get_local_fp32_param(weight).tolist() == (piece + 200).tolist()
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_local_masters_that_wait_are_cut_as_those_in_use(stage):
    run_ranks(2, local_masters_in_another_order, stage)
